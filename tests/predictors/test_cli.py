"""The commands as processes: answers, drains, several workers, reload, traces; bad input is refused in one line."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
import pytest

from predictors.client import ClientSettings, SyncPredictor
from predictors.commands.serve_predictor import main
from predictors.commands.tailcast_proxy import POSITIONALS
from predictors.commands.tailcast_proxy import main as proxy_main
from predictors.hosting import tracing
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from predictors.service import workers as module
from predictors.service.workers import Supervisor
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.shell.command import command
from tests.predictors.fakes import expected, replace_artifact, version_prefix, without_numbers, write_artifact
from tests.predictors.proxy.fake_engine import CHAT, chat, paused, running_engine, stream_events
from tests.waiting import eventually, until

PATIENCE_S = 150.0
REQUEST = PredictionRequest("r", "name three rivers", 100)
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Process:
    """A running command; its log goes to a file, so that it never has to be read to go on."""

    def __init__(self, folder: Path, artifact: Path, *arguments: str) -> None:
        self.port_file = folder / "port"
        self._log = folder / "log"
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "predictors.commands.serve_predictor",
            str(artifact),
            "--port=0",
        ]
        with self._log.open("wb") as stream:
            options = ["--http_port=0", f"--port_file={self.port_file}", *arguments]
            self.process = subprocess.Popen([*command, *options], stderr=stream)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        assert eventually(lambda: self.process.poll() is not None or condition()), self.log
        assert self.process.poll() is None, self.log

    def ports(self) -> tuple[int, int]:
        """gRPC and HTTP port, once it is ready."""
        self.wait_for(self.port_file.exists)
        self.wait_for(lambda: re.search(r"ready on \S+, http on \S+:\d+", self.log))
        return int(self.port_file.read_text()), int(re.findall(r"http on \S+?:(\d+)", self.log)[-1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)

    def workers(self) -> list[int]:
        """Pids of its child processes that run."""
        pids = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                if child.status() != psutil.STATUS_ZOMBIE:
                    pids.append(child.pid)
        return pids


@contextlib.contextmanager
def running(folder: Path, artifact: Path, *arguments: str) -> Iterator[Process]:
    process = Process(folder, artifact, *arguments)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def version(port: int) -> str:
    """What the artifact's version begins with, where it was given such a prefix, else all of it."""
    # A pool of its own: else all channels to one address share a connection, and so a worker.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub = PredictorStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S, wait_for_ready=True)
        return version_prefix(answer.artifact_version) or answer.artifact_version


def num_replaced(server: Process) -> int:
    """How many workers have replaced the artifact of version one, by the log."""
    return len(re.findall(r"version two\+\w+ replaces one\+", server.log))


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_served_process_answers_then_drains_and_exits_0(tmp_path: Path, number: int) -> None:
    with running(tmp_path, write_artifact(tmp_path / "tiny")) as server:
        port, _ = server.ports()
        with SyncPredictor(f"127.0.0.1:{port}", ClientSettings(timeout_s=PATIENCE_S)) as predictor:
            [prediction] = predictor.predict([REQUEST])
        assert prediction.length is not None
        assert prediction.length.mu == pytest.approx(expected("name three rivers")[0], rel=1e-6)
        assert server.stop(number) == 0, server.log
        assert "execution provider CPUExecutionProvider (requested: auto)" in server.log
        assert f"ready on 127.0.0.1:{port}" in server.log
        assert "draining 0 requests" in server.log
        assert "Traceback" not in server.log
        assert not server.port_file.exists()


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1, error
    assert error.startswith("serve-predictor: error: ")
    return error


def test_port_in_use_is_one_line(artifact_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("port", "http_port"):
            assert main([str(artifact_folder), "--port=0", f"--{name}={port}"]) == 2
            line = one_error_line(capsys)
            assert f"error: {name}: got '127.0.0.1:{port}'" in line
            assert "in use" in line


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (shutil.rmtree, "existing artifact folder"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "valid JSON"),
        (without_numbers, "the model returned mu = nan"),
    ],
    ids=["folder", "bad manifest", "no numbers"],
)
def test_broken_artifact_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], breakage, message: str
) -> None:
    folder = write_artifact(tmp_path / "a")
    breakage(folder)
    port_file = tmp_path / "port"
    port_file.write_text("50051\n")  # of a server that was killed
    assert main([str(folder), "--port", "0", "--port_file", str(port_file)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("serve-predictor: error: ")
    assert message in error
    assert not port_file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a --port 70000", "port: got 70000"),
        ("{artifact} --max_batch 0", "max_batch"),
        ("{artifact} --drain_timeout_s -1", "drain_timeout_s"),
        ("{artifact} --num_workers 0", "num_workers"),
        ("{artifact} --port_file {artifact}", "port_file"),
        ("a --config {config}", "port: got 70001"),
        ("{artifact} --workers 0", "workers: got 0"),
        ("{artifact} --tls_cert a.pem", "tls_cert, tls_key"),
        ("{artifact} --tls_client_ca a.pem", "tls_client_ca"),
        ("{artifact} --tls_cert a.pem --tls_key b.pem --port 0", "tls_cert"),
        ("{artifact} --token_file nothing --port 0", "token_file"),
        ("{artifact} --more_artifacts [nothing] --port 0", "existing artifact folder"),
    ],
)
def test_bad_option_is_one_line(
    artifact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"port": 70001}))
    assert main(arguments.format(artifact=artifact_folder, config=config).split()) == 2
    assert message in one_error_line(capsys)


def test_workers_share_ports_come_back_reload_and_drain(tmp_path: Path) -> None:
    replace_artifact(tmp_path, "one")
    with running(tmp_path, tmp_path / "current", "--workers=2") as server:
        port, http_port = server.ports()
        assert version(port) == "one"
        first = server.workers()
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        server.wait_for(lambda: len(set(server.workers()) - set(first)) == 1 and len(server.workers()) == 2)
        for _ in range(10):
            assert version(port) == "one"
        # Two, their supervisor, the one that came later.
        server.wait_for(lambda: server.log.count("ready on") >= 4)
        text = get(http_port, "/metrics")[1]
        answers = re.findall(r'tailcast_requests_total{.*code="OK".*} ([\d.]+)', text)
        # The count of all workers together, the dead one's included.
        assert sum(map(float, answers)) == 11
        replace_artifact(tmp_path, "two")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: num_replaced(server) == 2)
        assert {version(port) for _ in range(8)} == {"two"}
        assert server.stop() == 0
        assert "Traceback" not in server.log
        assert not server.port_file.exists()


def test_workers_end_with_their_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, write_artifact(tmp_path / "a"), "--workers=2") as server:
        server.ports()
        workers = [psutil.Process(pid) for pid in server.workers()]
        server.process.kill()
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []


def test_workers_that_cannot_start_end_the_command(tmp_path: Path) -> None:
    with running(tmp_path, tmp_path / "nothing", "--workers=2") as server:
        assert server.process.wait(timeout=PATIENCE_S) == 2
        assert "existing artifact folder" in server.log


def test_a_new_version_is_found_by_looking(tmp_path: Path) -> None:
    replace_artifact(tmp_path, "one")
    with running(tmp_path, tmp_path / "current", "--reload_poll_s=0.05", "--log_format=json") as server:
        port, _ = server.ports()
        assert version(port) == "one"
        replace_artifact(tmp_path, "two")
        server.wait_for(lambda: num_replaced(server) == 1)
        assert version(port) == "two"
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Address of an OTLP collector over HTTP, and the requests that it gets."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            requests.append(service.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_the_collector_with_their_parents_and_none_is_lost_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: tuple[str, list[Any]]
) -> None:
    endpoint, requests = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "lengths")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # nothing is sent before the end
    with running(tmp_path, write_artifact(tmp_path / "tiny"), "--traces=true") as server:
        port, http_port = server.ports()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
            context = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
            stub.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S, metadata=context)
            with pytest.raises(grpc.RpcError):
                stub.Predict(pb.PredictRequest(prompt=" "), timeout=PATIENCE_S)
            batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 3)
            stub.PredictBatch(batch, timeout=PATIENCE_S, metadata=context)
        assert get(http_port, "/v1/metadata")[0] == 200  # no prediction, no span
        assert requests == []
        assert server.stop() == 0
    resources = [one for request in requests for one in request.resource_spans]
    names = {one.key: one.value.string_value for each in resources for one in each.resource.attributes}
    assert names["service.name"] == "lengths"
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["Predict", "Predict", *["PredictBatch"] * 3]
    of_caller = [span for span in spans if span.trace_id.hex() == TRACE]
    assert [span.parent_span_id.hex() for span in of_caller] == [PARENT] * 4
    [refused] = [span for span in spans if span.trace_id.hex() != TRACE]
    assert (refused.parent_span_id, refused.status.message) == (b"", "INVALID_ARGUMENT")
    for span in of_caller:
        values = {one.key: one.value for one in span.attributes}
        assert values["tailcast.artifact_id"].string_value == "tiny"
        assert values["rpc.response.status_code"].string_value == "OK"
        assert values["tailcast.inference_s"].double_value > 0
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < PATIENCE_S * 1e9


def test_a_protocol_or_an_exporter_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in reversed(tracing.PROTOCOL_VARIABLES):
        monkeypatch.setenv(name, "http/json")
        with pytest.raises(InputError, match=f"{name}: got 'http/json'; allowed: http/protobuf or grpc"):
            tracing.set_up_exporting()
        monkeypatch.setenv(name, "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(MissingExtraError, match="opentelemetry-exporter-otlp-proto-grpc"):
        tracing.set_up_exporting()


IDLE_WORKER = """
import os, signal, sys
folder, plan, number = sys.argv[1:]
life = 0
while True:
    try:
        os.close(os.open(f"{folder}/{number}-{life}", os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        life += 1
steps = dict(part.split(":") for part in plan.split(","))
what = steps.get(f"{number}-{life}", steps.get("else", "serve"))
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what.startswith("late"):  # only once the other one serves
    os.read(os.open(f"{folder}/serving", os.O_RDWR), 1)
    if what == "latekilled":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
if what.isdigit():
    sys.exit(int(what))
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
open(f"{folder}/pid-{number}", "w").write(str(os.getpid()))
os.write(1, b"x")
os.write(os.open(f"{folder}/serving", os.O_RDWR), b"x" * 100)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)


async def supervised(folder: Path, plan: str, *, suspended: int | None = None) -> tuple[int, list[str], bool]:
    """Exit code, lives of workers (number-life), and whether all of them were ready at some time."""
    os.mkfifo(folder / "serving")
    command = [sys.executable, "-S", "-c", IDLE_WORKER, str(folder), plan]
    supervisor = Supervisor(command, 2, stop_timeout_s=120 if suspended is None else 1)
    was_ready = False

    def on_ready() -> None:
        nonlocal was_ready
        was_ready = True
        if suspended is not None:
            os.kill(int((folder / f"pid-{suspended}").read_text()), signal.SIGSTOP)
        supervisor.stop()

    async with asyncio.timeout(120):
        code = await supervisor.run(on_ready)
    lives = sorted(file.name for file in folder.glob("[0-9]-*"))
    return code, lives, was_ready


@pytest.mark.parametrize(
    ("plan", "lives"),
    [
        ("else:serve", ["0-0", "1-0"]),
        ("0-0:killed,1-0:killed", ["0-0", "0-1", "1-0", "1-1"]),
        ("1-0:latekilled", ["0-0", "1-0", "1-1"]),
        ("1-0:late,1-1:late", ["0-0", "1-0", "1-1", "1-2"]),
    ],
)
async def test_workers_that_end_are_started_again(tmp_path: Path, plan: str, lives: list[str]) -> None:
    assert await supervised(tmp_path, plan) == (0, lives, True)


async def test_workers_that_never_come_up_end_the_command(tmp_path: Path) -> None:
    for plan, exit_code in (("else:2", 2), ("else:killed", 1)):
        (tmp_path / plan).mkdir()
        code, lives, was_ready = await supervised(tmp_path / plan, plan)
        assert (code, was_ready) == (exit_code, False)
    assert module.MAX_EARLY_ENDS <= len(lives) <= module.MAX_EARLY_ENDS + 1  # killed again and again


async def test_a_worker_that_is_not_ready_again_yet_has_nothing_to_drain(tmp_path: Path) -> None:
    # Ready in its first life alone; then it takes for ever to start, without a handler for SIGTERM.
    first, second = tmp_path / "first", tmp_path / "second"
    script = (
        "import os, pathlib, signal, sys; first, second = map(pathlib.Path, sys.argv[1:3])\n"
        "again = first.exists(); (second if again else first).write_text(str(os.getpid()))\n"
        "if not again: os.write(1, b'x')\n"
        "signal.pause()"
    )
    command = [sys.executable, "-c", script, str(first), str(second)]
    supervisor = Supervisor(command, count=1, stop_timeout_s=120)
    ready = asyncio.Event()
    running = asyncio.create_task(supervisor.run(ready.set))
    async with asyncio.timeout(120):
        await ready.wait()
        os.kill(int(first.read_text()), signal.SIGKILL)
        await until(second.exists)
        supervisor.stop()
        assert await running == 0


# SIGTERM with a stopped worker overran drain_timeout_s.
@pytest.mark.mend
async def test_workers_that_end_too_late_are_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A suspended process does not get SIGTERM; the other one ends as it should.
    code, lives, was_ready = await supervised(tmp_path, "else:serve", suspended=0)
    assert (code, lives, was_ready) == (1, ["0-0", "1-0"], True)
    assert "killing 1 workers that still run 1 s after SIGTERM" in caplog.text


ROOT = Path(__file__).parents[2]


BAD_OPTIONS = {
    "": "missing: ENGINE_URL",
    "ftp://x": "engine_url: got 'ftp://x'; allowed: http://HOST:PORT",
    "URL --policy best": "policy: got 'best'",
    "URL --policy no.such:Policy": "policy: got 'no.such:Policy'",
    "URL --policy hrrn --engine vllm": "the key of policy hrrn changes while a request waits",
    "URL --policy s3": "policy s3 reserves KV memory, but the engine allocates its own",
    "URL --policy slai": "policy slai forms batches, but the engine forms its own",
    "URL --policy tie --policy_parameters '{gamma: 2}'": "gamma: got 2",
    "URL --predictor http://x": "predictor: got 'http://x'; allowed: pretrained, tiny, an artifact folder, or grpc://HOST:PORT",
    "URL --predictor no/such/folder": "predictor: got 'no/such/folder'",
    "URL --shadow_predictor x": "shadow_predictor: got 'x'; allowed: only together with feedback",
    "URL --slo_ttft_ms '[1, 2]'": "slo_ttft_ms: got [1, 2]",
    "URL --deadline_s 0": "deadline_s: got 0.0; allowed: seconds > 0, at most 60",
    "URL --client_priority drop": "client_priority",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_of_the_proxy_are_one_line(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert proxy_main(shlex.split(options.replace("URL", "http://127.0.0.1:1"))) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert BAD_OPTIONS[options] in line


def test_every_command_of_the_page_is_accepted(pki: Path) -> None:
    found: list[ProxyConfig] = []
    names = {"path/to/artifact": str(ROOT), "GATEWAY": "gateway", "ENGINE": "engine"}
    names |= {
        "tls.crt": f"{pki}/ours-server.pem",
        "tls.key": f"{pki}/ours-server.key",
        "engines.pem": f"{pki}/ours.pem",
    }
    text = (ROOT / "docs" / "proxy.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("tailcast-proxy http")]
    assert len(lines) == 8
    main = command("tailcast-proxy", ProxyConfig, found.append, positionals=POSITIONALS, extra="serve")
    for line in lines:
        for name, value in names.items():
            line = line.replace(name, value)
        assert main(shlex.split(line)[1:]) == 0
        ProxyServer(found[-1])
    assert [config.engine for config in found] == ["vllm", "sglang", "dynamo", "llm-d", *["none"] * 4]


async def test_sigterm_lets_the_proxy_finish_and_end_with_0(artifact_folder: Path, tmp_path: Path) -> None:
    go = asyncio.Event()
    ports, log = tmp_path / "ports", tmp_path / "log"
    async with running_engine(paused(stream_events(["a", "b"], 2), go)) as fake:
        options = f"--engine vllm --predictor {artifact_folder} --port 0 --admin_port 0 --port_file {ports}"
        options += f" --feedback {log} --feedback_usage true --log_format json --access_log true"
        words = [fake.url, *options.split()]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "predictors.commands.tailcast_proxy",
            *words,
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(120):
            await until(lambda: ports.exists() or process.returncode is not None)
            assert process.returncode is None
            port, admin = ports.read_text().split()
            async with aiohttp.ClientSession() as client:
                for path in ("healthz", "readyz"):
                    async with client.get(f"http://127.0.0.1:{admin}/{path}") as response:
                        assert response.status == 200
                _, writer = await asyncio.open_connection("127.0.0.1", int(port))
                writer.write(b"GET / HTTP/1.1\r\nAuthorization Bearer canary4711\r\n\r\n")
                await writer.drain()
                body = chat("name sea", stream=True)
                async with client.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as response:
                    assert await response.content.readany()
                    process.send_signal(signal.SIGTERM)
                    await until(lambda: not ports.exists() or process.returncode is not None)
                    go.set()
                    rest = await response.read()
            _, errors = await process.communicate()
    assert process.returncode == 0
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"usage"' not in rest
    writer.close()
    assert b"canary4711" not in errors
    lines = [json.loads(line) for line in errors.decode().splitlines()]
    assert any("BadHttpMessage" in line["message"] for line in lines)
    assert [line["code"] for line in lines if "code" in line] == ["200"]
    [segment] = log.iterdir()
    record = json.loads(segment.read_text())
    assert (record["output_tokens"], record["finish_reason"]) == (2, "stop")
