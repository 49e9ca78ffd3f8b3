"""The Grafana dashboard asks for metrics that service, proxy and vLLM plugin have, and for all that online calibration has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from predictors.runtime import open_runtime
from scheduler_core.adapters.engine_metrics import EngineMetrics
from tests.predictors.fakes import running_server, write_artifact
from tests.predictors.proxy.fake_engine import chat, plain, running_engine, running_proxy

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana-dashboard.json"


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def series(exposition: str) -> set[str]:
    """Names of the series that Prometheus stores from a scrape."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", exposition, flags=re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


@pytest.fixture
async def scraped(tmp_path: Path) -> set[str]:
    """Series of all three processes, each after a request."""
    artifact_folder = write_artifact(tmp_path / "artifact")
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
    async with (
        running_engine(plain) as engine,
        running_proxy(engine.url, predictor=str(artifact_folder), release=1) as proxy,
    ):
        assert (await proxy.post(chat("three rivers")))[0] == 200
        async with proxy.client.get(proxy.admin + "/metrics") as response:
            names |= series(await response.text())
    return names


async def test_every_metric_of_the_dashboard_is_scraped(scraped: set[str]) -> None:
    asked = {name for text in expressions() for name in re.findall(r"\btailcast_\w+", text)}
    assert len(asked) > 30
    assert asked - scraped == set()
    calibration = {name for name in scraped if "calibration_" in name}
    assert calibration
    assert {name for name in calibration - asked if not name.endswith("censored_outputs")} == set()


def test_panels_are_described_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(panel["title"] for panel in panels)
