"""What docs/production.md says of a running proxy, as far as other tests do not."""

import asyncio
import datetime
import json
import re
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml

from predictors.proxy.config import RELOADED, ProxyConfig
from predictors.proxy.server import ProxyServer
from scheduler_core.errors import InputError
from tests.predictors.proxy.fake_engine import CHAT, chat, gated, running_engine, running_proxy, until
from tests.predictors.proxy.test_signals import ROOT, config_of
from tests.predictors.proxy.test_tls import running_process

PAGE = (ROOT / "docs/production.md").read_text(encoding="utf-8")


def test_the_page_names_options_of_the_proxy() -> None:
    names = {name for name in re.findall(r"`-{0,2}(\w+)(?:: [\w{}\" ]+)?`", PAGE) if "_" in name}
    metrics = {name for name in names if name.startswith(("probe_", "tailcast_"))}
    assert len(names) > 6
    assert names - metrics <= set(ProxyConfig.__dataclass_fields__)


async def test_a_killed_proxy_ends_its_requests_in_the_engine_too(tmp_path: Path) -> None:
    ports, options = tmp_path / "ports", tmp_path / "options.yaml"
    content: dict[str, Any] = {"predictor": "none", "release": 1, "port": 0, "port_file": str(ports)}
    content |= {"calibration_file": str(tmp_path / "calibration")}
    options.write_text(json.dumps(content))
    async with (
        asyncio.timeout(120),
        running_engine(gated(asyncio.Event())) as fake,
        aiohttp.ClientSession() as client,
    ):
        async with running_process(options, fake.url) as proxy:
            url = f"http://127.0.0.1:{int(ports.read_text())}{CHAT}"
            posts = [asyncio.create_task(client.post(url, json=chat("x"))) for _ in range(2)]
            await until(lambda: fake.num_in_flight == 1)
            proxy.process.kill()
            await proxy.process.wait()
            results = await asyncio.gather(*posts, return_exceptions=True)
            assert all(isinstance(result, aiohttp.ClientError) for result in results)
            await until(lambda: fake.num_gone == 1)
        async with running_process(options, fake.url):  # its port file and lock are no obstacle
            pass


async def test_an_expired_certificate_stops_new_connections_only(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")

    def issue(**options: Any) -> None:
        certificate = authority.issue_cert("localhost", **options)
        certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
        certificate.private_key_pem.write_to_path(str(tmp_path / "tls.key"))

    issue()
    files = {"tls_cert": str(tmp_path / "tls.crt"), "tls_key": str(tmp_path / "tls.key")}
    async with running_engine() as fake, running_proxy(fake.url, **files) as proxy:

        async def post(client: aiohttp.ClientSession) -> int:
            async with client.post(proxy.url + CHAT, json=chat("x"), ssl=context) as response:
                return response.status

        assert await post(proxy.client) == 200
        yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        issue(not_before=yesterday - datetime.timedelta(days=1), not_after=yesterday)
        await proxy.server.reload(proxy.server.handler.config)
        assert await post(proxy.client) == 200
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientConnectorCertificateError, match="expired"):
                await post(client)
            issue()
            await proxy.server.reload(proxy.server.handler.config)
            assert await post(client) == 200


@pytest.mark.parametrize("option", ["calibration_file", "session_file"])
def test_a_damaged_state_file_is_named_at_the_start(option: str, tmp_path: Path) -> None:
    file = tmp_path / "state"
    options: dict[str, Any] = {"predictor": "none", option: str(file)}
    options |= {"policy": "working_set"} if option == "session_file" else {}
    file.write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"{option}: got '{file}'"):
        ProxyServer(ProxyConfig(engine_url="http://127.0.0.1:1", **options))
    file.unlink()
    ProxyServer(ProxyConfig(engine_url="http://127.0.0.1:1", **options))


async def test_overload_is_refused_with_a_time_to_come_back() -> None:
    go = asyncio.Event()
    async with running_engine(gated(go)) as fake, running_proxy(fake.url, release=1, max_waiting=1) as proxy:
        posts = [asyncio.create_task(proxy.post(chat("x"))) for _ in range(2)]
        await until(lambda: proxy.server.num_in_flight == 2)
        async with proxy.client.post(proxy.url + CHAT, json=chat("x")) as response:
            assert (response.status, int(response.headers["Retry-After"]) > 0) == (429, True)
        go.set()
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 2


async def test_predictions_are_switched_off_without_a_restart(artifact_folder: Path) -> None:
    assert "predictor" in RELOADED
    assert "policy" not in RELOADED
    async with running_engine() as fake, running_proxy(fake.url, predictor=str(artifact_folder)) as proxy:
        assert (await proxy.post(chat("sea")))[0] == 200
        await proxy.server.reload(config_of(proxy.server, predictor="none"))
        assert (await proxy.post(chat("sea")))[0] == 200
        for outcome in ("answered", "absent"):
            assert await proxy.metric(f'tailcast_proxy_predictions_total{{outcome="{outcome}"}}') == 1


async def test_fcfs_is_the_order_of_arrival(artifact_folder: Path) -> None:
    options: dict[str, Any] = {"engine": "vllm", "policy": "fcfs", "predictor": str(artifact_folder)}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        for prompt in ("an essay of many words", "sea", "name three rivers"):
            assert (await proxy.post(chat(prompt)))[0] == 200
        priorities = [body["priority"] for body in fake.bodies]
        assert priorities == sorted(priorities)
        assert len(set(priorities)) == 3


def test_the_proxy_is_bypassed_by_a_port_that_the_engine_has() -> None:
    """The patch of the service keeps its port, whose target is a name."""
    patch = json.loads(re.findall(r"--patch '(.*?)'", PAGE)[0])
    templates = ROOT / "deploy/chart/templates"
    text = {name: (templates / f"{name}.yaml").read_text(encoding="utf-8") for name in ("proxy", "engine")}
    assert patch["spec"]["selector"]["app.kubernetes.io/name"].removeprefix("llm-") == "engine"
    assert "app.kubernetes.io/name: {{ .Release.Name }}-engine" in text["engine"]
    service = yaml.safe_load(text["proxy"].split("---")[2].replace("{{ .Release.Name }}", "llm"))
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    assert "- name: http\n              containerPort: 8000" in text["engine"]
