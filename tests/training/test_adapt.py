"""`adapt`: logged requests correct an artifact for their served models, or nothing is written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors.artifact import KIND, open_artifact
from predictors.modules.config import Conditioning
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.artifacts import ArtifactSource
from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_directory
from tests.predictors import fakes
from tests.predictors.proxy.fake_engine import chat, completion, running_engine, running_proxy
from training.commands.adapt import main
from training.correcting.adapt import NOT_BETTER, adapt
from training.correcting.config import AdaptConfig

#: Words that the tiny model knows, without those that break it.
TEXT = fakes.WORDS[: fakes.WORDS.index("nan")]


def prompts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(TEXT, size)) for size in rng.integers(2, 12, count)]


def drawn(mu: float, sigma: float, rng: np.random.Generator, nu: float = 3.5) -> int:
    return max(1, round(float(np.exp(mu + sigma * rng.standard_t(nu)))))


def entry(number: int, prompt: str, tokens: int, model: str, **request: Any) -> dict[str, Any]:
    """A request of a gateway's log with its response; outputs beyond 3000 tokens are truncated."""
    choice = {"index": 0, "finish_reason": "stop" if tokens < 3000 else "length"}
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3000, "model": model}
    usage = {"prompt_tokens": 5, "completion_tokens": min(tokens, 3000)}
    response = {"id": f"r{number}", "model": model, "choices": [choice], "usage": usage}
    return {"request": body | request, "response": response}


def write_log(
    path: Path, draw: Callable[[str, np.random.Generator], int], model: str, num: int = 100
) -> Path:
    """A log of requests whose lengths are drawn from their prompts."""
    rng = np.random.default_rng(1)
    lines = [entry(number, text, draw(text, rng), model) for number, text in enumerate(prompts(num))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def adapted(log: Path, artifact: Path, out: Path, **options: Any) -> int:
    return adapt(AdaptConfig(log=str(log), artifact=str(artifact), out=str(out), progress=False, **options))


def replaceable_artifact(folder: Path) -> Path:
    """The rich artifact, with the record of an export."""
    with atomic_directory(folder, KIND) as temporary:
        fakes.write_rich_artifact(temporary)
    return folder


def shifted(text: str, rng: np.random.Generator, number: int = 1) -> int:
    """Half a log token longer than predicted, and half as variable."""
    numbers = fakes.expected_rich(text, number)
    return drawn(numbers["mu"] + 0.5, 0.5 * numbers["sigma"], rng)


def test_a_known_model_is_corrected_and_all_others_stay_the_same_to_the_bit(tmp_path: Path) -> None:
    old, out = fakes.write_rich_artifact(tmp_path / "old"), tmp_path / "new"
    assert adapted(write_log(tmp_path / "log.jsonl", shifted, "tiny-llm", 300), old, out) == 0
    before, after = (open_runtime(folder, provider="cpu") for folder in (old, out))
    assert after.artifact.manifest.artifact_id == before.artifact.manifest.artifact_id
    assert after.artifact.manifest.served_models == before.artifact.manifest.served_models
    texts = prompts(40)
    for name in ("huge-llm", None):
        one, other = (side.predict(texts, [name] * 40).arrays() for side in (before, after))
        assert all((values == other[head]).all() for head, values in one.items())
    one, other = (side.predict(texts, ["tiny-llm"] * 40) for side in (before, after))
    assert other.mu - one.mu == pytest.approx(0.5, abs=0.15)
    assert np.log(other.sigma / one.sigma) == pytest.approx(np.log(0.5), abs=0.2)
    assert (other.urgency == one.urgency).all()
    assert (other.rank == one.rank).all()
    [record] = after.artifact.manifest.metrics["adaptations"]
    assert record["artifact_version"] == before.artifact.manifest.artifact_version
    assert list(record["corrections"]) == ["tiny-llm"]
    page = (tmp_path / "new.html").read_text()
    assert "CRPS, ln tokens" in page and "tiny-llm" in page  # noqa: PT018


@pytest.mark.mend
def test_turns_of_an_agent_are_adapted_and_left_out_rows_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that end with the result of a tool were left out (140 of 160), and the exit code was 0."""
    call = {"id": "k", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    rng, log = np.random.default_rng(1), tmp_path / "log.jsonl"
    lines = []
    for number, text in enumerate(prompts(300)):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": ""},
            {"role": "user", "content": text},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "k", "content": "a file"},
        ]
        lines.append(entry(number, "", shifted(text, rng), "tiny-llm", messages=messages, max_tokens=-1))
    failed = {**lines[0], "response": {"error": {"message": "Bad Gateway"}}}
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *[failed] * 301]))
    old = fakes.write_rich_artifact(tmp_path / "old")
    assert adapted(log, old, tmp_path / "new") == 3
    assert caplog.messages[-1] == "left out 301 of 601 rows: 301 x failed"
    runtimes = [open_runtime(folder, provider="cpu") for folder in (old, tmp_path / "new")]
    one, other = (runtime.predict(prompts(40), ["tiny-llm"] * 40) for runtime in runtimes)
    assert other.mu - one.mu == pytest.approx(0.5, abs=0.15)


#: Refuses imports of packages that the extra `adapt` does not install.
WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from tailcast.cli import main
sys.exit(main(sys.argv[1:]))
"""
ABSENT = {"torch", "transformers", "lightning", "peft", "datasets", "duckdb", "onnxscript", "grpc", "aiohttp"}


def test_it_needs_no_torch(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", shifted, "tiny-llm", 300)
    options = ("--artifact", fakes.write_rich_artifact(tmp_path / "old"), "--out", tmp_path / "new")
    command = [sys.executable, "-c", WITHOUT_TORCH.format(absent=ABSENT), "adapt", log, *options]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert open_artifact(tmp_path / "new").manifest.metrics["adaptations"]


def test_a_new_served_model_is_known_afterwards_and_again_after_a_second_log(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", lambda text, rng: shifted(text, rng, 2), "new-llm")
    assert adapted(log, fakes.write_rich_artifact(tmp_path / "old"), tmp_path / "one") == 0
    more = write_log(tmp_path / "more.jsonl", lambda text, rng: shifted(text, rng, 0), "newer-llm")
    assert adapted(more, tmp_path / "one", tmp_path / "two") == 0
    first, second = (open_runtime(tmp_path / name, provider="cpu") for name in ("one", "two"))
    assert second.artifact.manifest.served_models == ("tiny-llm", "huge-llm", "new-llm", "newer-llm")
    texts = prompts(40)
    one, other = (side.predict(texts, ["new-llm"] * 40) for side in (first, second))
    assert (one.mu == other.mu).all()
    assert one.mu == pytest.approx([fakes.expected_rich(text, 2)["mu"] + 0.5 for text in texts], abs=0.25)
    newer = second.predict(texts, ["newer-llm"] * 40)
    assert newer.mu == pytest.approx([fakes.expected_rich(text, 0)["mu"] + 0.5 for text in texts], abs=0.25)


@pytest.mark.parametrize("model", ["tiny-llm", "other-llm"])
def test_an_artifact_that_does_not_see_the_served_model(model: str, tmp_path: Path) -> None:
    def draw(text: str, rng: np.random.Generator) -> int:
        mu, sigma = fakes.expected(text)
        return drawn(mu + 1.0, sigma, rng)

    old = fakes.write_artifact(tmp_path / "old")
    assert adapted(write_log(tmp_path / "log.jsonl", draw, model), old, tmp_path / "new") == 0
    runtime = open_runtime(tmp_path / "new", provider="cpu")
    texts = prompts(20)
    after = runtime.predict(texts, [model] * 20)
    assert after.mu == pytest.approx([fakes.expected(text)[0] + 1.0 for text in texts], abs=0.35)
    # Clients that name no model are served as before.
    assert len(runtime.predict(texts, [None] * 20)) == 20


def test_nothing_is_written_where_nothing_is_better(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def draw(text: str, rng: np.random.Generator) -> int:
        numbers = fakes.expected_rich(text, 1)
        return drawn(numbers["mu"], numbers["sigma"], rng, numbers["nu"])

    old = replaceable_artifact(tmp_path / "old")
    log = write_log(tmp_path / "log.jsonl", draw, "tiny-llm", 300)
    words = [str(log), "--artifact", str(old), "--out", str(tmp_path / "new"), "--progress", "false"]
    assert main(words) == NOT_BETTER
    assert "not better than the old artifact" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "old"]
    words[words.index("--out") + 1] = str(old)
    assert main([*words, "--overwrite", "true"]) == NOT_BETTER
    assert open_artifact(old).manifest.metrics == {}


def test_what_cannot_be_adapted_is_refused_with_the_reason(tmp_path: Path) -> None:
    old = replaceable_artifact(tmp_path / "old")
    log = write_log(tmp_path / "log.jsonl", shifted, "tiny-llm", 40)
    with pytest.raises(InputError, match="prompts with outputs: got '.* and .*'; allowed: at least 20"):
        adapted(log, old, tmp_path / "new")
    few = tmp_path / "few.jsonl"
    lines = [
        entry(number, f"{text} {number}", 9, f"m{number % 5}") for number, text in enumerate(prompts(90))
    ]
    few.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match="no served model has 20 prompts to fit to"):
        adapted(few, old, tmp_path / "new")
    short = fakes.write_rich_artifact(tmp_path / "short", heads=("urgency",))
    with pytest.raises(InputError, match="a length head"):
        adapted(log, short, tmp_path / "new")
    with pytest.raises(InputError, match="--overwrite true replaces this artifact"):
        adapted(log, old, old)
    with pytest.raises(InputError, match="held_back"):
        adapted(log, old, tmp_path / "new", held_back=0.95)


def test_features_of_the_encoder_say_what_the_heads_do_not(tmp_path: Path) -> None:
    def draw(text: str, rng: np.random.Generator) -> int:
        return drawn(6.5 if "essay" in text else 3.5, 0.3, rng)

    log = write_log(tmp_path / "log.jsonl", draw, "new-llm", 300)
    assert adapt(AdaptConfig(log=str(log), out=str(tmp_path / "new"), progress=False)) == 0
    runtime = open_runtime(tmp_path / "new", provider="cpu")
    [record] = runtime.artifact.manifest.metrics["adaptations"]
    assert record["corrections"]["new-llm"]["uses_features"]
    texts = prompts(60)
    mu = np.asarray(runtime.predict(texts, ["new-llm"] * 60).mu)
    is_essay = np.array(["essay" in text for text in texts])
    assert mu[is_essay].mean() - mu[~is_essay].mean() > 1.0
    assert "conformal.json" not in runtime.artifact.manifest.files


async def test_a_newcomer_with_400_gateway_logs(tmp_path: Path) -> None:
    """Gateway logs, `adapt`, the service reloads, the proxy predicts and logs, and its log adapts again."""
    folder = replaceable_artifact(tmp_path / "artifact")
    log = write_log(tmp_path / "gateway.jsonl", lambda text, rng: shifted(text, rng, 3), "my-llm", 400)
    rng = np.random.default_rng(2)
    source = ArtifactSource(str(folder), fakes.serve_config(provider="cpu"))
    query = pb.PredictRequest(prompt="name three rivers", served_model="my-llm")
    async with fakes.server_and_stub(source.open(), reopen=lambda name: source.open()) as (server, stub):
        unknown = await stub.Predict(query)
        assert adapted(log, folder, folder, overwrite=True, report=str(tmp_path / "page.html")) == 0
        assert await server.artifacts.reload("tiny")
        known = await stub.Predict(query)
        assert known.mu - unknown.mu == pytest.approx(3.5, abs=0.3)
        assert "my-llm" in (await stub.GetMetadata(pb.GetMetadataRequest())).served_models

    async def script(request: Any, body: bytes) -> Any:
        from aiohttp import web

        [message] = json.loads(body)["messages"]
        return web.json_response(completion(min(500, shifted(message["content"], rng, 1))))

    feedback = tmp_path / "feedback"
    options = {"predictor": str(folder), "feedback": str(feedback), "feedback_prompts": "stored"}
    async with running_engine(script) as engine, running_proxy(engine.url, **options) as proxy:
        for text in prompts(120):
            assert (await proxy.post(chat(text, model="my-llm")))[0] == 200
    assert adapted(feedback, folder, tmp_path / "second", report=str(tmp_path / "second.html")) == 0
    again = open_runtime(tmp_path / "second", provider="cpu").predict(["name three rivers"], ["my-llm"])
    assert again.rows()[0]["mu"] == pytest.approx(known.mu - 2.0, abs=0.4)


# One name with a line break among the served models ended a run of 164 s with nothing.
@pytest.mark.mend
def test_rows_with_strange_names_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, log = fakes.write_rich_artifact(tmp_path / "old"), tmp_path / "log.jsonl"
    lines = write_log(log, shifted, "tiny-llm", 300).read_text()
    names = ("a\nb", "x" * 257, "tab\t", "\x7f", "\u2028")
    entries = [entry(1000 + row, text, 9, names[row % 5]) for row, text in enumerate(prompts(150))]
    log.write_text(lines + "".join(json.dumps(each) + "\n" for each in entries))
    caplog.set_level("INFO")
    assert adapted(log, old, tmp_path / "new") == 0
    manifest = open_artifact(tmp_path / "new").manifest
    assert list(manifest.metrics["adaptations"][-1]["corrections"]) == ["tiny-llm"]
    assert "150 of 450" in caplog.text
    assert "name of the served model" in caplog.text


@pytest.mark.mend
@pytest.mark.parametrize("name", ["a\nb", "x" * 501, "\x7f"])
def test_names_that_no_artifact_may_have_are_refused_before_training(name: str) -> None:
    """Training ended well, and the export of its checkpoint was refused."""
    with pytest.raises(InputError, match="served_models: got .*; allowed: names of 1 to 500 characters"):
        Conditioning(served_models=("m", name))
