"""Connection of a command to a running Ray cluster, or to a local one that is stopped with the command."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scheduler_core.errors import InputError, MissingExtraError, TailcastError, first_line

LOCAL = "local"
CONNECT_SECONDS = 10.0
_STATISTICS = "RAY_USAGE_STATS_ENABLED"


@contextmanager
def ray_cluster(address: str, field: str, num_cpus: int | None = None) -> Iterator[Any]:
    """Connects to a cluster and yields the module `ray`. An existing connection of this process is reused and
    kept. `TailcastError` if there is no cluster at the address, none can be started, or Ray is not installed.

    `address` is that of a running cluster (HOST:PORT, ray://HOST:PORT, auto), or `local` to start one on this
    machine with `num_cpus` processors (None: all). `field` names the address in errors.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    connects = not ray.is_initialized()
    if connects:
        _connect(ray, address, field, num_cpus)
    try:
        yield ray
    finally:
        if connects:
            ray.shutdown()


def fetch_result(ray: Any, reference: Any, task: str, retries: int, finished: str) -> Any:
    """The result of a remote task; raises the `TailcastError` of the task. If the task is still lost after `retries`
    by Ray: `TailcastError` with the texts `task` ("a block") and `finished` ("finished blocks are kept")."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TailcastError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        lost = f"{task} was lost on the Ray cluster {retries + 1} times ({first_line(error)})"
        raise TailcastError(f"{lost}; {finished}, run the same command again to continue") from error


def _connect(ray: Any, address: str, field: str, num_cpus: int | None) -> None:
    if address != LOCAL:
        _check_reachable(address, field)
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, field, error) from error
        return
    before = os.environ.get(_STATISTICS)
    # Usage statistics of a local cluster are off by default.
    os.environ.setdefault(_STATISTICS, "0")
    try:
        ray.init(address=LOCAL, num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # Ray raises various types if its processes do not start within 30 s
        problem = f"no Ray cluster could be started on this machine ({first_line(error)})"
        raise TailcastError(problem) from error
    finally:
        if before is None:
            os.environ.pop(_STATISTICS, None)


def _check_reachable(address: str, field: str) -> None:
    """Tests the connection first, because Ray takes minutes to fail at an address without a server."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        return  # "auto", or an address that Ray validates
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, field, error) from error


def _no_cluster(address: str, field: str, error: Exception) -> InputError:
    return InputError(field, address, f"local, or the address of a running Ray cluster ({first_line(error)})")
