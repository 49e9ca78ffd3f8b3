"""The deployment files are valid, agree with each other, start what the project has and ask for metrics that there are."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
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
from predictors.proxy.config import ProxyConfig
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
CHART = DEPLOY / "chart"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
PANELS = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def rendered(template: str, values: dict[str, Any]) -> str:
    """A template of the chart. It has only fields of `.Values` and the release's name, if, else, end, toYaml, nindent and quote."""

    def field(name: str) -> Any:
        value: Any = {"Values": values, "Release": {"Name": "llm"}}
        for part in name.removeprefix(".").split("."):
            value = value[part]
        return value

    def evaluated(expression: str) -> str:
        source, *functions = expression.split(" | ")
        name, *arguments = source.split()
        value = field(arguments[0] if name == "toYaml" else name)
        text = yaml.safe_dump(value).rstrip() if name == "toYaml" else str(value)
        for function in functions:
            match function.split():
                case ["nindent", num]:
                    text = "\n" + "\n".join(" " * int(num) + line for line in text.splitlines())
                case ["quote"]:
                    text = json.dumps(text)
                case _:
                    raise AssertionError(function)
        return text

    output, shown = [""], [True]
    for text, trim, action in re.findall(r"(.*?)(?:\{\{(-?) (.+?) \}\}|\Z)", template, flags=re.DOTALL):
        if shown[-1]:
            output.append(text.rstrip() if trim else text)
        match action.split(maxsplit=1):
            case []:
                pass
            case ["if", name]:
                shown.append(shown[-1] and bool(field(name)))
            case ["else"]:
                shown[-1] = shown[-2] and not shown[-1]
            case ["end"]:
                shown.pop()
            case _ if shown[-1]:
                output.append(evaluated(action))
    assert shown == [True]
    return "".join(output)


VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
#: What a user may set -> the values.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "defaults": {},
    "tls": {
        "proxy": {"tlsSecret": "certificate", "otlpEndpoint": "http://collector:4318"},
        "predictor": {"tlsSecret": "of-predictor"},
    },
    "volumes": {
        "engine": {"cacheClaim": "models"},
        "predictor": {"artifactClaim": "mine", "artifact": "/artifact"},
    },
    "own engine": {"engine": {"enabled": False}, "proxy": {"engineUrl": "https://gateway"}},
}


def values_of(setting: str) -> dict[str, Any]:
    changes = SETTINGS[setting]
    return {
        name: value | changes.get(name, {}) if isinstance(value, dict) else value
        for name, value in VALUES.items()
    }


def manifests(setting: str = "defaults") -> dict[tuple[str, str], dict[str, Any]]:
    """Kind and name without the release's -> manifest, with the values of `SETTINGS`."""
    by_name: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((CHART / "templates").glob("*.yaml")):
        for one in yaml.safe_load_all(rendered(path.read_text(encoding="utf-8"), values_of(setting))):
            if one is not None:
                by_name[one["kind"], one["metadata"]["name"].removeprefix("llm-")] = one
    return by_name


def container(name: str, setting: str = "defaults") -> dict[str, Any]:
    [main] = manifests(setting)["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return dict(main)


def entrypoint() -> list[str]:
    [line] = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, flags=re.MULTILINE)
    return [*json.loads(line)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_kubernetes_accepts_every_manifest(setting: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    assert len(manifests(setting)) == 10 + 3 * (setting != "own engine")
    for manifest in manifests(setting).values():
        validate.validate(manifest, "1.37", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("setting", SETTINGS)
def test_go_renders_the_templates_in_the_same_way(setting: str, tmp_path: Path) -> None:
    """kubectl has the template language of Helm without toYaml, nindent and quote, which are replaced by their results."""
    values = values_of(setting)
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "Release": {"Name": "llm"}}
    (tmp_path / "values.json").write_text(json.dumps({**head, "Values": values}), encoding="utf-8")

    def result(action: re.Match[str]) -> str:
        return f"{{{{{action[1]} {json.dumps(rendered(action[0], values))} }}}}"

    for path in (CHART / "templates").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        template = re.sub(r"\{\{(-?) (?:toYaml .*?|\S+ \| quote) \}\}", result, text)
        (tmp_path / "template").write_text(template, encoding="utf-8")
        words = ["kubectl", "label", "--local", "-f", str(tmp_path / "values.json"), "a=b"]
        words += ["-o", f"go-template-file={tmp_path / 'template'}"]
        output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        assert output.strip() == rendered(text, values).strip()


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("setting", SETTINGS)
def test_helm_renders_the_chart_in_the_same_way(setting: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(SETTINGS[setting]), encoding="utf-8")
    options = [str(CHART), "--values", str(tmp_path / "values.yaml")]
    words = ["helm", "template", "llm", *options]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    documents = [one for one in yaml.safe_load_all(output) if one is not None]
    chart = {(one["kind"], one["metadata"]["name"].removeprefix("llm-")): one for one in documents}
    assert chart == manifests(setting)
    subprocess.run(["helm", "lint", "--strict", *options], check=True, capture_output=True)


def test_the_chart_uses_each_value_and_no_other() -> None:
    def names(value: dict[str, Any], prefix: str = "") -> set[str]:
        leaves: set[str] = set()
        for name, inner in value.items():
            is_taken_whole = name in ("options", "resources") or not isinstance(inner, dict)
            leaves |= {prefix + name} if is_taken_whole else names(inner, f"{prefix}{name}.")
        return leaves

    templates = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"\.Values\.([\w.]+)", templates)) == names(VALUES)
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["apiVersion"], chart["name"], chart["appVersion"]) == (
        "v2",
        "tailcast",
        VALUES["image"].partition(":")[2],
    )
    assert sum(line.lstrip().startswith("#") for line in lines) > 12


@pytest.mark.parametrize("setting", SETTINGS)
def test_manifests_speak_of_the_same_pods_and_ports(setting: str) -> None:
    chart = manifests(setting)
    for (kind, name), manifest in chart.items():
        spec = manifest.get("spec", {})
        if kind == "ConfigMap":
            continue
        deployment = chart["Deployment", name]["spec"]["template"]
        [main] = deployment["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in main["ports"]}
        labels = deployment["metadata"]["labels"].items()
        match kind:
            case "Deployment":
                assert spec["selector"]["matchLabels"].items() <= labels
                mounted = {mount["name"] for mount in main["volumeMounts"]}
                assert mounted == {volume["name"] for volume in deployment["spec"]["volumes"]}
                probed = {
                    probe.get("httpGet", probe.get("grpc"))["port"]
                    for key, probe in main.items()
                    if key.endswith("Probe")
                }
                assert probed <= {*ports, *ports.values()}
                scraped = deployment["metadata"]["annotations"]["prometheus.io/port"]
                assert int(scraped) in ports.values()
            case "Service":
                assert spec["selector"].items() <= labels
                assert {port["targetPort"]: port["port"] for port in spec["ports"]}.items() <= ports.items()
            case "PodDisruptionBudget":
                assert spec["selector"]["matchLabels"].items() <= labels
            case "NetworkPolicy":
                assert spec["podSelector"]["matchLabels"].items() <= labels
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == set(ports)
                assert name == "proxy" or all(rule["from"] for rule in spec["ingress"])
            case "HorizontalPodAutoscaler":
                assert spec["scaleTargetRef"]["name"] == chart["Deployment", name]["metadata"]["name"]
    policy = chart["NetworkPolicy", "predictor"]["spec"]
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])
    clients = chart["NetworkPolicy", "predictor"]["spec"]["ingress"][0]["from"][0]["podSelector"][
        "matchLabels"
    ]
    assert clients.items() <= chart["Deployment", "proxy"]["spec"]["template"]["metadata"]["labels"].items()
    ports = {port["containerPort"] for port in container("predictor")["ports"]}
    exposed = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, flags=re.MULTILINE)[0]
    assert ports == {int(port) for port in exposed.split()}


def options_of(source: str) -> tuple[list[str], list[str]]:
    """The command lines of proxy and predictor in a file: "compose", or a setting of the chart."""
    if source == "compose":
        services = documents(DEPLOY / "compose.yaml")[0]["services"]
        return [*services["proxy"]["entrypoint"], *services["proxy"]["command"]], [
            *entrypoint(),
            *services["predictor"]["command"],
        ]
    proxy, predictor = container("proxy", source), container("predictor", source)
    return [*proxy["command"], *proxy["args"]], [*predictor["command"], *predictor["args"]]


def resolved(command: list[str], config_class: Any, positionals: tuple[str, ...]) -> Any:
    """The options of a command line, as its command reads them."""
    configs: list[Any] = []

    def keep(config: Any) -> int:
        configs.append(config)
        return 0

    main = make_command(command[0], config_class, keep, positionals=positionals, extra="serve")
    assert main(command[1:]) == 0
    return configs[0]


@pytest.mark.parametrize("source", ["compose", *SETTINGS])
def test_proxy_predictor_and_engine_fit_together(source: str, tmp_path: Path) -> None:
    """Options are those of the commands, and agree with each other, with the engine's, and with the time to drain."""
    (tmp_path / "artifact").mkdir()
    file = tmp_path / "proxy.yaml"
    [compose] = documents(DEPLOY / "compose.yaml")
    setting = "defaults" if source == "compose" else source
    chart = manifests(setting)
    text = (DEPLOY / "proxy/proxy.yaml").read_text(encoding="utf-8")
    file.write_text(text if source == "compose" else chart["ConfigMap", "proxy"]["data"]["config.yaml"])
    folder = "/etc/tailcast/" + ("proxy.yaml" if source == "compose" else "config.yaml")
    proxy_line, predictor_line = options_of(source)
    proxy_line = [
        word.replace(f"--config={folder}", f"--config={file}").replace("=/state", f"={tmp_path}")
        for word in proxy_line
    ]
    predictor_line = [str(tmp_path / "artifact") if word == "/artifact" else word for word in predictor_line]
    assert (proxy_line[0], predictor_line[0]) == ("tailcast-proxy", "serve-predictor")
    proxy = resolved(proxy_line, ProxyConfig, ("engine_url", "replicas"))
    predictor = resolved(predictor_line, ServeConfig, ("artifact",))
    assert (proxy.host, proxy.port, proxy.admin_port) == ("0.0.0.0", 8080, 8081)
    assert (predictor.host, predictor.port, predictor.http_port) == ("0.0.0.0", 50051, 8080)
    if source == "compose":
        services = compose["services"]
        assert proxy.engine_url == "http://engine:8000"
        assert proxy.predictor == f"grpc://predictor:{predictor.port}"
        assert {"proxy", "predictor", "engine"} <= set(services)
        words = services["engine"]["command"]
        graces = [
            int(services[name]["stop_grace_period"].removesuffix("s")) for name in ("proxy", "predictor")
        ]
    else:
        engine = chart.get(("Service", "engine"), {"metadata": {"name": ""}})["metadata"]["name"]
        assert proxy.engine_url == (f"http://{engine}:8000" if engine else "https://gateway")
        scheme = "grpcs" if source == "tls" else "grpc"
        service = chart["Service", "predictor"]["metadata"]["name"]
        assert proxy.predictor == f"{scheme}://{service}:{predictor.port}"
        words = container("engine", setting)["args"] if engine else []
        names = ("proxy", "predictor")
        graces = [
            chart["Deployment", name]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            for name in names
        ]
    for grace, config in zip(graces, (proxy, predictor), strict=True):
        assert grace >= config.drain_delay_s + config.drain_timeout_s + 5
    if words:
        assert {f"--max-num-seqs={proxy.max_num_seqs}", "--scheduling-policy=priority", "--port=8000"} <= set(
            words
        )
    certificate = "/etc/tailcast-tls/tls.crt" if source == "tls" else None
    assert (proxy.tls_cert, predictor.tls_cert, proxy.traces) == (certificate, certificate, source == "tls")
    assert proxy.predictor_ca == ("/etc/tailcast-predictor/ca.crt" if source == "tls" else None)


def test_files_name_one_version_of_image_and_engine() -> None:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert (
        services["proxy"]["image"]
        == services["predictor"]["image"]
        == VALUES["image"]
        == f"tailcast:{version}"
    )
    [vllm] = [text for text in metadata.requires("tailcast") or () if text.startswith("vllm")]
    tag = VALUES["engine"]["image"].rpartition(":v")[2]
    assert Requirement(vllm).specifier.contains(tag)
    assert VALUES["engine"]["image"] in services["engine"]["image"]


def test_the_image_has_what_the_chart_asks_for() -> None:
    """Traces need an extra, and the calibration a folder that the user of the image can write."""
    [extras] = re.findall(r'"\.\[(.*?)\]"', DOCKERFILE)
    assert {"serve", "traces"} <= set(extras.split(","))
    assert "--owner=10001 --group=10001 /state" in DOCKERFILE


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


def test_the_metric_that_is_scaled_on_exists() -> None:
    [metric] = manifests()["HorizontalPodAutoscaler", "predictor"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    metrics = ServiceMetrics()
    ArtifactMetrics(metrics, "tiny")
    assert name.encode() in metrics.exposition()
    assert name in (DEPLOY / "metrics-adapter.yaml").read_text(encoding="utf-8")


def test_compose_builds_the_image_and_mounts_what_exists() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    predictor = compose["services"]["predictor"]
    build = predictor["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    scraped = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    targets = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["predictor:8080", "proxy:8081", "engine:8000"]
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists()


def test_the_image_is_made_of_files_that_are_there_and_is_nobodys_root() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source} is left out by .dockerignore"
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, flags=re.MULTILINE)
    assert (
        int(user)
        == manifests()["Deployment", "proxy"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
        > 0
    )


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], check=True)


async def test_health_check_tells_a_server_that_serves_from_none(artifact_folder: Path) -> None:
    import asyncio

    from deploy.check_health import is_serving

    async with running_server(open_runtime(artifact_folder)) as (_, address):
        assert await asyncio.to_thread(is_serving, address)
    assert not await asyncio.to_thread(is_serving, address, 1.0)


async def test_health_check_reaches_a_server_with_tls(artifact_folder: Path, tmp_path: Path) -> None:
    import asyncio

    import trustme

    from deploy.check_health import is_serving

    certificate = trustme.CA().issue_cert("predictor.example")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key"))
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(str(tmp_path / "certificate"), append=True)
    files = {"tls_cert": str(tmp_path / "certificate"), "tls_key": str(tmp_path / "key")}
    async with running_server(open_runtime(artifact_folder), **files) as (_, address):
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


async def test_every_metric_of_dashboard_and_alerts_is_scraped(artifact_folder: Path) -> None:
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
    [groups] = documents(DEPLOY / "alerts.yaml")
    rules = [rule for group in groups["groups"] for rule in group["rules"]]
    expressions += [rule["expr"] for rule in rules]
    assert all({"alert", "expr"} <= set(rule) <= {"alert", "expr", "for"} for rule in rules)
    page = (ROOT / "docs/production.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules] == re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    asked = {name for text in expressions for name in re.findall(r"\btailcast_\w+", text)}
    assert len(asked) > 30
    assert asked - names == set()
    calibration = {name for name in names if "calibration_" in name}
    assert calibration
    assert {name for name in calibration - asked if not name.endswith("censored_outputs")} == set()
