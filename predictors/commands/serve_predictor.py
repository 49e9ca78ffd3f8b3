"""Command `serve-predictor`: serves artifacts over gRPC and optionally HTTP until SIGTERM."""

from __future__ import annotations

from predictors.service.config import ServeConfig
from scheduler_core.shell.command import command


def serve(config: ServeConfig) -> int:
    """Serves until SIGTERM or SIGINT; then finishes requests in flight."""
    from predictors.hosting.logs import set_up_logs
    from predictors.hosting.process import PortFile, ignore_hangups

    ignore_hangups()
    port_file = PortFile(config.port_file)
    set_up_logs(config.log_format)
    if config.workers > 1:
        from predictors.service.workers import run_workers

        return run_workers(config, port_file)
    from predictors.service.process import run_server

    run_server(config, lambda port: port_file.write(port), port_file.remove)
    return 0


main = command("serve-predictor", ServeConfig, serve, positionals=("artifact",), extra="serve")


if __name__ == "__main__":
    raise SystemExit(main())
