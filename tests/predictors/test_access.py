"""Predictors at grpcs://: certificates and tokens of real services, in every place where a predictor can be named."""

import asyncio
import datetime
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import tailcast
from predictors.client import ClientSettings, GrpcPredictor, PredictorError, SyncPredictor
from predictors.client import access as module
from predictors.runtime import open_runtime
from scheduler_core.adapters.litellm import QuotaSettings
from scheduler_core.adapters.settings import PredictorSettings, read_settings
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import PredictionRequest, PredictorAddress, open_predictor
from scheduler_core.prediction.service_access import ServiceAccess
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import prepare_predictions
from scheduler_core.simulator.trace import load_trace
from tailcast.commands.predict import main as predict_main
from tailcast.length_predictor import open_length_predictor
from tests.predictors import fakes
from tests.predictors.proxy.fake_engine import RunningProxy, chat, running_engine, running_proxy
from tests.predictors.test_cli import running
from tests.waiting import until

REQUEST = PredictionRequest("r", "the sea", 100)
FAILED = 'tailcast_proxy_predictions_total{outcome="failed"}'
ANSWERED = 'tailcast_proxy_predictions_total{outcome="answered"}'


@pytest.fixture(autouse=True)
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look for new files at each call."""
    monkeypatch.setattr(module, "CHECK_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path, pki: Path) -> Path:
    """A folder with the files of a client, and of two services."""
    for path in pki.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(pki / "ours.pem", tmp_path / "ca.pem")
    for name in ("token", "tokens"):
        (tmp_path / name).write_text("first\n")
    return tmp_path


def replaced(file: Path, content: str | bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(file)


def client_files(folder: Path) -> dict[str, str]:
    names = {"ca": "ca.pem", "cert": "ours-client.pem", "key": "ours-client.key", "token_file": "token"}
    return {f"predictor_{name}": str(folder / file) for name, file in names.items()}


def server_files(folder: Path, authority: str = "ours") -> dict[str, str]:
    return {
        "tls_cert": str(folder / f"{authority}-server.pem"),
        "tls_key": str(folder / f"{authority}-server.key"),
    }


def demanding(folder: Path) -> dict[str, str]:
    """Options of a service that demands a certificate and a token."""
    demands = {"tls_client_ca": str(folder / "ours.pem"), "token_file": str(folder / "tokens")}
    return server_files(folder) | demands


def url_of(address: str) -> str:
    return f"grpcs://{address.replace('127.0.0.1', 'localhost')}"


async def post(proxy: RunningProxy, name: str) -> float:
    """Sends a request, which succeeds in any case, and returns the count of this outcome of its prediction."""
    assert (await proxy.post(chat("name sea")))[0] == 200
    return await proxy.metric(name)


# A proxy could reach a service of another machine only without encryption and token.
@pytest.mark.mend
async def test_a_proxy_presents_certificate_and_token_and_follows_new_ones(
    folder: Path, artifact_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [f"--{name}={file}" for name, file in demanding(folder).items()]
    async with running_engine() as fake:
        with running(folder, artifact_folder, *options) as server:
            port, _ = await asyncio.to_thread(server.ports)
            predictor = f"grpcs://localhost:{port}"
            named = client_files(folder)
            async with running_proxy(fake.url, engine="vllm", predictor=predictor, **named) as proxy:
                assert await post(proxy, ANSWERED) == 1
                replaced(folder / "tokens", "second\n")
                server.process.send_signal(signal.SIGHUP)
                await until(lambda: "tokens: read again" in server.log)
                assert await post(proxy, FAILED) == 1
                text = "a valid bearer token is needed; the token is that of predictor_token_file"
                assert caplog.text.count(text) == 1
                replaced(folder / "token", "# that of the proxy\nsecond\n")
                assert await post(proxy, ANSWERED) == 2
                replaced(folder / "token", "")
                assert await post(proxy, ANSWERED) == 3
                assert "rejected the new files, kept the old ones: token_file: got" in caplog.text
                with pytest.raises(
                    InputError, match="predictor_token_file: got .*token'; allowed: a file that"
                ):
                    await proxy.server.reload(proxy.server.handler.config)
                assert await post(proxy, ANSWERED) == 4
            assert server.stop() == 0
    assert "second" not in caplog.text
    assert all(isinstance(body["priority"], int) for body in fake.bodies)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("authority", "the certificate of the server is invalid: unable to get local issuer certificate"),
        ("expired", "the certificate of the server is invalid: certificate has expired"),
        (
            "host",
            "the certificate of the server is invalid: Hostname mismatch, certificate is not valid for 'local",
        ),
        ("no certificate", "the server ends the connection: it may demand another client certificate"),
        ("no TLS", "there is no TLS connection: wrong version number"),
        ("no token", "a valid bearer token is needed; the token is that of predictor_token_file"),
    ],
    ids=lambda value: value.replace(" ", "_") if len(value) < 15 else "",
)
async def test_each_fault_is_named_once_and_costs_no_request(
    folder: Path, artifact_folder: Path, caplog: pytest.LogCaptureFixture, fault: str, message: str
) -> None:
    trustme = pytest.importorskip("trustme")
    options, named = demanding(folder), client_files(folder)
    if fault == "authority":
        shutil.copy(folder / "theirs.pem", folder / "ca.pem")
    if fault in ("expired", "host"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        host = "localhost" if fault == "expired" else "other.example"
        ends = datetime.datetime(2020, 1, 1) if fault == "expired" else None
        certificate = authority.issue_cert(host, not_after=ends)
        certificate.private_key_pem.write_to_path(options["tls_key"])
        certificate.cert_chain_pems[0].write_to_path(options["tls_cert"])
    if fault == "no certificate":
        del named["predictor_cert"], named["predictor_key"]
    if fault == "no TLS":
        options = {}
    if fault == "no token":
        del named["predictor_token_file"]
    async with (
        fakes.running_server(open_runtime(artifact_folder), **options) as (_, address),
        running_engine() as fake,
        running_proxy(
            fake.url, engine="vllm", predictor=url_of(address), deadline_s=1.0, warm_up_s=4.0, **named
        ) as proxy,
    ):
        assert await post(proxy, FAILED) == 1
        assert await post(proxy, FAILED) == 2
        own = [
            record.getMessage() for record in caplog.records if record.name == "predictors.client.grpc_client"
        ]
        assert [message in text for text in own] == [True]
        blocking = SyncPredictor.of(PredictorAddress.of(url_of(address)), ServiceAccess(**named))
        with blocking, pytest.raises(PredictorError, match=message.partition(";")[0]):
            await asyncio.to_thread(blocking.predict, [REQUEST], timeout_s=4.0)


async def test_clients_survive_a_restart_with_another_certificate(
    folder: Path, artifact_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one of the same CA as it is, with one of a new CA when its file has been replaced; a bad file changes nothing."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))

    def issue() -> dict[str, str]:
        certificate = authority.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(str(folder / "ours-server.key"))
        certificate.cert_chain_pems[0].write_to_path(str(folder / "ours-server.pem"))
        return server_files(folder)

    access = ServiceAccess(predictor_ca=str(folder / "ca.pem"))
    clients: dict[str, Any] = {}
    port = 0

    async def works() -> bool:
        """Whether both clients get predictions; none of them does otherwise."""
        calls = (
            clients["calls"].predict([REQUEST], timeout_s=20.0),
            asyncio.to_thread(clients["blocking"].predict, [REQUEST], timeout_s=20.0),
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, PredictorError)]
        assert len(errors) in (0, 2)
        assert all("the certificate of the server is invalid" in str(error) for error in errors)
        return not errors

    for files, is_known in ((issue(), True), (issue(), True), (server_files(folder, "theirs"), False)):
        options = files | {"port": port}
        async with fakes.running_server(open_runtime(artifact_folder), **options) as (_, address):
            if not port:
                port = int(address.rpartition(":")[2])
                target = PredictorAddress.of(url_of(address))
                clients = {
                    "calls": GrpcPredictor.of(target, access),
                    "blocking": SyncPredictor.of(target, access),
                }
            assert await works() is is_known
            if not is_known:
                replaced(folder / "ca.pem", "nothing")
                assert not await works()
                assert caplog.text.count("rejected the new files, kept the old ones: tls ca: got") == 2
                replaced(folder / "ca.pem", (folder / "theirs.pem").read_bytes())
                assert await works()
    await clients["calls"].close()
    clients["blocking"].close()


async def test_calls_in_flight_end_when_certificates_are_replaced(
    folder: Path, artifact_folder: Path
) -> None:
    runtime = fakes.GatedRuntime(artifact_folder)
    runtime.gate.clear()
    access = ServiceAccess(predictor_ca=str(folder / "ca.pem"))
    async with fakes.running_server(runtime, **server_files(folder)) as (server, address):
        target = PredictorAddress.of(url_of(address))
        async with GrpcPredictor.of(target, access) as client:
            with SyncPredictor.of(target, access) as blocking:
                calls = [
                    asyncio.create_task(client.predict([REQUEST])),
                    asyncio.create_task(asyncio.to_thread(blocking.predict, [REQUEST])),
                ]
                await until(lambda: server.num_in_flight == 2)
                both = (folder / "theirs.pem").read_bytes() + (folder / "ours.pem").read_bytes()
                replaced(folder / "ca.pem", both)
                calls.append(asyncio.create_task(client.predict([REQUEST])))
                calls.append(asyncio.create_task(asyncio.to_thread(blocking.predict, [REQUEST])))
                await until(lambda: server.num_in_flight == 4)
                runtime.gate.set()
                assert [len(predictions) for predictions in await asyncio.gather(*calls)] == [1] * 4


async def test_all_places_have_the_same_options(
    folder: Path, artifact_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = client_files(folder)
    trace = folder / "trace.jsonl"
    row = {"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 9, "max_tokens": 20}
    trace.write_text(json.dumps(row | {"prompt": "the sea"}))
    async with fakes.running_server(open_runtime(artifact_folder), **demanding(folder)) as (_, address):
        url = url_of(address)

        def blocking() -> None:
            words = [f"--{name}={file}" for name, file in named.items()]
            assert predict_main(["the sea", "--predictor", url, *words]) == 0
            assert "tokens" in capsys.readouterr().out
            with open_length_predictor(f"{artifact_folder}+{url}", ServiceAccess(**named)) as joined:
                assert not joined.predictions(["the sea"], [None], [None])[0].missing
            config = SimulationConfig(trace=str(trace), policy="tie", predictor=url, **named)
            assert prepare_predictions(config, load_trace(trace)).num_failed == 0
            training = pytest.importorskip("training.evaluating.batch_predictor")
            options = training.InferenceOptions(progress=False, access=ServiceAccess(**named))
            assert training.open_batch_predictor(url, options).has_length

        await asyncio.to_thread(blocking)
        (folder / "plugin.yaml").write_text(json.dumps({"policy": "tie", "predictor": url, **named}))
        settings: list[PredictorSettings] = [
            read_settings({"tailcast": {"policy": "tie", "predictor": url, **named}}, {}),
            read_settings({}, {"TAILCAST_CONFIG": str(folder / "plugin.yaml")}),
            QuotaSettings.of({"predictor": url, **named}, "quota"),
        ]
        for each in settings:
            assert each.predictor is not None
            predictor = open_predictor(each.predictor, access=each)
            assert len(await predictor.predict([REQUEST], timeout_s=20.0)) == 1
            await predictor.close()
    # The CAs of the system.
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    async with fakes.running_server(open_runtime(artifact_folder), **server_files(folder)) as (_, address):
        with tailcast.connect(url_of(address)) as connected:
            assert (await asyncio.to_thread(connected.predict, "the sea")).median > 0


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("grpcs://h:1", {"predictor_ca": "nothing"}, "predictor_ca: got .*nothing'; allowed: the path of an"),
        (
            "grpcs://h:1",
            {"predictor_ca": "ours-server.key"},
            "predictor_ca: got .*; allowed: a PEM certificate",
        ),
        (
            "grpcs://h:1",
            {"predictor_cert": "ours-client.pem"},
            "predictor_cert, predictor_key: got .*; allowed: both",
        ),
        (
            "grpcs://h:1",
            {"predictor_cert": "ours-client.pem", "predictor_key": "theirs-client.key"},
            "predictor_key: got .*theirs-client.key'; allowed: the PEM private key",
        ),
        (
            "grpcs://h:1",
            {"predictor_token_file": "nothing"},
            "predictor_token_file: got .*; allowed: the path of",
        ),
        (
            "grpcs://h:1",
            {"predictor_token_file": "ca.pem"},
            "predictor_token_file: got .*; allowed: a file with one",
        ),
        (
            "grpc://h:1",
            {"predictor_ca": "ca.pem"},
            "predictor_ca: got .*; allowed: unset with grpc://h:1, which has",
        ),
        (
            "tiny+grpc://192.0.2.1:1",
            {"predictor_token_file": "token"},
            "predictor_token_file: got .*token'; allowed: unset without TLS, unless the service is on this machine",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_files_that_cannot_be_used_are_named(
    folder: Path, address: str, options: dict[str, str], message: str
) -> None:
    access = ServiceAccess(**{name: str(folder / file) for name, file in options.items()})
    with pytest.raises(InputError, match=message):
        open_predictor(address, access=access)
    with pytest.raises(InputError, match=message):
        open_length_predictor(address, access)


# The token was sent in plain text to any machine.
@pytest.mark.mend
def test_a_token_leaves_this_machine_only_with_tls(folder: Path) -> None:
    settings = ClientSettings(token="secret-1")
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/predictor.sock", "127.9.0.1:1"):
        assert GrpcPredictor(address, settings).address == SyncPredictor(address, settings).address == address
    for address in ("192.0.2.1:1", "[2001:db8::1]:1", "localhost.example:1", "127.0.0.1.example:1"):
        for client in (GrpcPredictor, SyncPredictor):
            with pytest.raises(InputError, match="token: got '...'; allowed: unset without TLS") as caught:
                client(address, settings)
            assert "secret" not in str(caught.value)
    access = ServiceAccess(predictor_token_file=str(folder / "token"))
    assert open_predictor("grpc://127.0.0.1:1", access=access) is not None
