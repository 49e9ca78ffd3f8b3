"""The deployment files are valid, agree with each other, start what the project has and ask for metrics that there are."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client import CollectorRegistry, generate_latest

from predictors.artifact import open_artifact
from predictors.client import ClientSettings, PredictorError, SyncPredictor
from predictors.runtime import open_runtime
from predictors.service.config import ServeConfig
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics
from scheduler_core.adapters.engine_metrics import EngineMetrics
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.shell.command import command as make_command
from tests.predictors.fakes import expected, running_server
from tests.predictors.proxy.fake_engine import chat, plain, running_engine, running_proxy

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
PANELS = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def manifest(kind: str) -> dict[str, Any]:
    [found] = [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]
    return found


def entrypoint() -> list[str]:
    [line] = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, flags=re.MULTILINE)
    return [*json.loads(line)]


def container() -> dict[str, Any]:
    [found] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_accepts_every_manifest(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        if document["apiVersion"].startswith("kustomize"):
            continue  # a file for kubectl, not for the API
        validate.validate(document, "1.37", strict=True)


def test_kustomization_names_all_manifests() -> None:
    [kustomization] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert set(kustomization["resources"]) == {path.name for path in MANIFESTS} - {"kustomization.yaml"}


def test_the_network_policy_is_of_the_pods_and_their_ports() -> None:
    policy = manifest("NetworkPolicy")["spec"]
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert policy["podSelector"]["matchLabels"].items() <= labels
    ports = {port["name"] for port in container()["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    assert all(rule["from"] for rule in policy["ingress"])
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])


# Bodies of any size were read into the memory of a replica.
@pytest.mark.mend
async def test_bodies_of_ray_serve_are_limited() -> None:
    pytest.importorskip("ray.serve")
    from deploy.ray_serve import MAX_BODY_BYTES, limited_body

    def request(num_parts: int) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            for _ in range(num_parts):
                nonlocal num_read
                num_read += 1
                yield bytes(2**20)

        return SimpleNamespace(stream=stream)

    num_read = 0
    assert await limited_body(request(4)) == bytes(MAX_BODY_BYTES)
    num_read = 0
    assert await limited_body(request(1000)) is None
    assert num_read == 5


def test_every_dependency_is_pinned() -> None:
    """The direct ones and theirs, of everything that `make test` installs."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    seen: set[tuple[str, str]] = set()
    pending = [("tailcast", "dev")]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                other = canonicalize_name(requirement.name)
                pending += [(other, part) for part in ("", *requirement.extras)]
    assert len(seen) > 150
    assert {name for name, _ in seen} - pinned <= {"tailcast", "setuptools"}


def test_manifests_speak_of_the_same_pods_and_ports() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        manifest("Deployment")["spec"]["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    scaled = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", manifest("Deployment")["metadata"]["name"])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    exposed = {int(port) for port in re.findall(r"^EXPOSE (.*)$", DOCKERFILE, flags=re.MULTILINE)[0].split()}
    assert set(ports.values()) == exposed
    assert {port["targetPort"] for port in manifest("Service")["spec"]["ports"]} == set(ports)
    assert {f"--port={ports['grpc']}", f"--http_port={ports['http']}"} <= set(entrypoint())
    for probe in ("startupProbe", "readinessProbe"):
        assert container()[probe]["grpc"]["port"] == ports["grpc"]
    claim = manifest("Deployment")["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]
    assert claim["claimName"] == manifest("PersistentVolumeClaim")["metadata"]["name"]


def test_a_pod_is_given_the_time_it_needs_to_drain() -> None:
    options = dict(one.removeprefix("--").split("=") for one in container()["args"])
    grace = manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= float(options["drain_delay_s"]) + float(options["drain_timeout_s"]) + 5


def test_the_metric_that_is_scaled_on_exists() -> None:
    [metric] = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    metrics = ServiceMetrics()
    ArtifactMetrics(metrics, "tiny")
    assert name.encode() in metrics.exposition()
    assert name in (DEPLOY / "metrics-adapter.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", ["compose", "kubernetes", "image"])
def test_every_option_is_one_of_the_command(source: str, tmp_path: Path) -> None:
    [default] = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, flags=re.MULTILINE)
    [compose] = documents(DEPLOY / "compose.yaml")
    options = {"compose": compose["services"]["predictor"]["command"], "kubernetes": container()["args"]}
    options["image"] = json.loads(default)
    command, *arguments = [*entrypoint(), *options[source]]
    assert command == "serve-predictor"
    seen: list[ServeConfig] = []

    def keep(config: ServeConfig) -> int:
        seen.append(config)
        return 0

    main = make_command(command, ServeConfig, keep, positionals=("artifact",), extra="serve")
    assert main(arguments) == 0
    assert (seen[0].host, seen[0].port, seen[0].http_port) == ("0.0.0.0", 50051, 8080)


def test_compose_builds_the_image_and_leaves_time_to_drain() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    predictor = compose["services"]["predictor"]
    build = predictor["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert predictor["image"] == container()["image"]
    assert int(predictor["stop_grace_period"].removesuffix("s")) > ServeConfig(artifact="a").drain_timeout_s
    scraped = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    [target] = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == "predictor:8080"


def test_the_image_is_made_of_files_that_are_there_and_is_nobodys_root() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source} is left out by .dockerignore"
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, flags=re.MULTILINE)
    assert int(user) == manifest("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsUser"] > 0


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], check=True)


async def test_health_check_tells_a_server_that_serves_from_none(artifact_folder: Path) -> None:
    import asyncio

    from deploy.check_health import is_serving

    async with running_server(open_runtime(artifact_folder)) as (_, address):
        assert await asyncio.to_thread(is_serving, address)
    assert not await asyncio.to_thread(is_serving, address, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "starlette", "uvicorn")),
    reason="ray[serve] is not installed",
)
def test_ray_serve_answers_over_grpc_and_http(artifact_folder: Path, tmp_path: Path) -> None:
    import urllib.request

    from benchmarks.shared.processes import free_port, running

    [config] = documents(DEPLOY / "ray_serve.yaml")
    grpc_port, http_port = free_port(), free_port()
    config["grpc_options"]["port"] = grpc_port
    config["http_options"] = {"host": "127.0.0.1", "port": http_port}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    one_try = ClientSettings(max_attempts=1, timeout_s=30)
    wanted = [PredictionRequest(prompt, prompt, 100) for prompt in ("sea", "a long essay")]

    def answers() -> bool:
        with SyncPredictor(f"127.0.0.1:{grpc_port}", one_try) as client:
            try:
                return len(client.predict(wanted[:1])) == 1
            except PredictorError:
                return False

    command = [sys.executable, "-m", "ray.serve.scripts", "run"]
    command += [str(tmp_path / "serve.yaml"), "--app-dir", str(ROOT)]
    environment = {"PYTHONPATH": str(ROOT), "ARTIFACT": str(artifact_folder), "RAY_USAGE_STATS_ENABLED": "0"}
    with running(command, answers, environment=environment, timeout_s=180):
        with SyncPredictor(f"127.0.0.1:{grpc_port}", one_try) as client:
            version = open_artifact(artifact_folder).manifest.artifact_version
            assert client.metadata().artifact_version == version
            found = client.predict(wanted)
            with pytest.raises(PredictorError, match="prompt") as caught:
                client.predict([PredictionRequest("r", " ", 100)])
        mus = [expected(one.prompt)[0] for one in wanted]
        assert [one.length.mu for one in found] == pytest.approx(mus, rel=1e-5)
        assert caught.value.code == "INVALID_ARGUMENT"
        body = json.dumps({"prompt": "sea", "max_tokens": 100}).encode()
        url = f"http://127.0.0.1:{http_port}/v1/predict"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
            assert json.loads(response.read())["mu"] == pytest.approx(expected("sea")[0], rel=1e-5)


def series(exposition: str) -> set[str]:
    """Names of the series that Prometheus stores from a scrape."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", exposition, flags=re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


async def test_every_metric_of_the_dashboard_is_scraped(artifact_folder: Path) -> None:
    """Of all three processes, each after a request."""
    registry = CollectorRegistry()
    EngineMetrics(registry)
    names = series(generate_latest(registry).decode())
    async with (
        running_server(open_runtime(artifact_folder), http_port=0) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        async with session.post("/v1/predict", json={"prompt": "three rivers"}) as response:
            assert response.status == 200
        async with session.get("/metrics") as response:
            names |= series(await response.text())
    options = {"predictor": str(artifact_folder), "release": 1}
    async with running_engine(plain) as engine, running_proxy(engine.url, **options) as proxy:
        assert (await proxy.post(chat("three rivers")))[0] == 200
        async with proxy.client.get(proxy.admin + "/metrics") as response:
            names |= series(await response.text())
    expressions = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
    asked = {name for text in expressions for name in re.findall(r"\btailcast_\w+", text)}
    assert len(asked) > 30
    assert asked - names == set()
    calibration = {name for name in names if "calibration_" in name}
    assert calibration
    assert {name for name in calibration - asked if not name.endswith("censored_outputs")} == set()
