"""The live page of the service: reported lengths, a prompt, tenants, and access."""

from pathlib import Path
from typing import Any

import aiohttp

from predictors.runtime import open_runtime
from tests.predictors import fakes
from tests.waiting import until


async def report(
    session: aiohttp.ClientSession, request_id: str, text: str, tokens: int, **more: Any
) -> None:
    """Reports one true length."""
    row = {"request_id": request_id, "prompt": text, "output_tokens": tokens, "finished": True} | more
    async with session.post("/v1/observe", json=row) as response:
        assert (await response.json())["num_accepted"] == 1


async def test_reported_lengths_and_nearest_past_requests_until_there_are_tenants() -> None:
    async with (
        fakes.server_and_stub(open_runtime("tiny"), http_port=0) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):

        async def state() -> Any:
            async with session.get("/ui/state.json") as response:
                return await response.json()

        async def explained(**query: str) -> tuple[int, Any]:
            async with session.post("/ui/explain", json=query) as response:
                return response.status, await response.json()

        empty = await state()
        assert (empty["ended"]["p50"], empty["order"], empty["shows_tenants"]) == ([], None, False)
        assert "POST /v1/observe" in empty["hint"]
        await report(session, "sea", "Write about the sea", 700)
        await report(session, "cat", "Is it a cat?", 2)
        async with session.get("/ui/state.json?model=") as response:
            assert (await response.json())["model"] == ""

        async def has_learned() -> bool:
            metrics = (await state())["learned"]["metrics"]
            return metrics is not None and metrics["num_outputs"] == 2

        await until(has_learned)
        now = await state()
        assert now["ended"]["request_id"] == ["sea", "cat"]
        assert now["ended"]["output_tokens"] == [700, 2]
        assert now["learned"]["metrics"]["num_outputs"] == 2
        status, result = await explained(prompt="Is it a cat?", tenant="other")
        assert (status, result["tenant"]) == (200, "")
        assert result["neighbors"][0]["request_id"] == "cat"
        await report(session, "dog", "Is it a dog?", 2, tenant="team")
        await until(lambda: server._calls.learner.has_tenants)
        assert {row["request_id"] for row in (await explained(prompt="Is it a cat?"))[1]["neighbors"]} == {""}


async def test_page_needs_the_token_of_the_service(artifact_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("first\n")
    options: dict[str, Any] = {"token_file": str(tmp_path / "tokens"), "http_port": 0}
    async with (
        fakes.server_and_stub(open_runtime(artifact_folder), **options) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        for path in ("/", "/ui/state.json"):
            async with session.get(path) as response:
                assert response.status == 401
            async with session.get(path, headers={"Authorization": "Bearer first"}) as response:
                assert response.status == 200
        async with session.post("/ui/explain", json={"prompt": "sea"}) as response:
            assert response.status == 401
