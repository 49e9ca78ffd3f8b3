"""vLLM sampled offline, with a stand-in and for real, and as a server that is killed in the middle."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.shared.processes import free_port
from benchmarks.vllm.model import NAME as MODEL
from benchmarks.vllm.model import packaged_model
from data_gen.backend import SamplingSettings, Work, sample_seed
from data_gen.prompts import Prompt
from data_gen.samples import read_samples
from data_gen.sampling_run import STORE_NAME
from data_gen.vllm_backend import VllmBackend, VllmOptions
from scheduler_core.errors import InputError, MissingExtraError
from tests.data_gen.conftest import ROOT, save_tiny_llama, vllm_environment
from tests.waiting import eventually

SETTINGS = SamplingSettings(num_samples=3, max_tokens=12, temperature=0.7, top_p=0.9, seed=4)
PROMPTS = [Prompt(f"p{i}", " ".join(["word"] * (i + 1))) for i in range(6)]
MAX_TOKENS = 48


class Tokenizer:
    """One token for each word."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


class Engine:
    """Each request takes as many steps as its seed says; seeds that eleven divides are aborted."""

    def __init__(self, max_model_len: int) -> None:
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.running: dict[str, Any] = {}
        self.requests: list[tuple[Any, Any]] = []
        self.aborted: list[str] = []
        self.most = 0

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.requests.append((prompt, params))
        self.running[request_id] = SimpleNamespace(params=params, steps=0)
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Any]:
        outputs = []
        for request_id, request in list(self.running.items()):
            request.steps += 1
            seed, limit = request.params.seed, request.params.max_tokens
            if finished := request.steps >= min(1 + seed % 15, limit):
                del self.running[request_id]
            reason = "abort" if seed % 11 == 0 else "stop" if 1 + seed % 15 <= limit else "length"
            completion = {"token_ids": [7] * request.steps, "finish_reason": reason if finished else None}
            times = {"queued_ts": 10.0, "scheduled_ts": 10.5, "first_token_ts": 11.0}
            metrics = SimpleNamespace(**times, last_token_ts=10.0 + request.steps) if seed % 2 else None
            completions = [SimpleNamespace(**completion, text=f"seed {seed}")]
            output = {"request_id": request_id, "finished": finished, "metrics": metrics}
            outputs.append(SimpleNamespace(**output, outputs=completions))
        return outputs

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            del self.running[request_id]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `vllm` with what the backend uses of it."""
    module = ModuleType("vllm")
    module.made = []  # type: ignore[attr-defined]

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            if arguments["model"] == "broken":
                raise ValueError("no such\nmodel")
            self.arguments = arguments
            self.llm_engine = Engine(arguments.get("max_model_len", 100))
            module.made.append(self)  # type: ignore[attr-defined]

        def get_tokenizer(self) -> Tokenizer:
            return Tokenizer()

    module.LLM, module.SamplingParams, module.__version__ = LLM, SimpleNamespace, "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_each_answer_is_a_request_with_its_own_seed(stub: ModuleType) -> None:
    backend = VllmBackend("folder/my-model", options=VllmOptions(max_num_seqs=4, engine_args={"seed": 1}))
    results = list(backend.sample([Work(PROMPTS[0], (0, 2)), Work(PROMPTS[4], (1,))], SETTINGS))
    (llm,) = stub.made
    assert (backend.served_model, backend.version) == ("my-model", "9.9")
    assert llm.arguments["seed"] == 1
    assert not {"max_model_len", "engine_args"} & set(llm.arguments)
    seeds = [sample_seed(4, "p0", 0), sample_seed(4, "p0", 2), sample_seed(4, "p4", 1)]
    assert [params.seed for _, params in llm.llm_engine.requests] == seeds
    assert [len(prompt["prompt_token_ids"]) for prompt, _ in llm.llm_engine.requests] == [1, 1, 5]
    for _, params in llm.llm_engine.requests:
        assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 0.7, 0.9, 12)
    assert len(results) == 3


def test_lengths_reasons_and_timings_are_the_engines(stub: ModuleType) -> None:
    backend = VllmBackend("m")
    found = 0
    for result in backend.sample([Work(prompt, tuple(range(20))) for prompt in PROMPTS], SETTINGS):
        for failure in result.failures:
            assert sample_seed(4, result.prompt.prompt_id, failure.sample_index) % 11 == 0
            assert (failure.kind, failure.reason) == ("aborted", "the engine finished with reason 'abort'")
        for answer in result.outputs:
            seed = sample_seed(4, result.prompt.prompt_id, answer.sample_index)
            length = 1 + seed % 15
            assert answer.text == f"seed {seed}"
            assert answer.output_tokens == min(length, 12)
            assert answer.finish_reason == ("stop" if length <= 12 else "length")
            timings = (0.5, 1.0, float(answer.output_tokens)) if seed % 2 else (None, None, None)
            assert (answer.queue_s, answer.ttft_s, answer.total_s) == timings
            found += 1
    assert found > 100


def test_the_engine_is_kept_full_but_no_more(stub: ModuleType) -> None:
    taken = 0

    def work() -> Iterator[Work]:
        nonlocal taken
        for number in range(10_000):
            taken += 1
            yield Work(Prompt(f"p{number}", "x"), (0, 1, 2))

    backend = VllmBackend("m", options=VllmOptions(max_num_seqs=4))
    results = backend.sample(work(), SETTINGS)
    for _ in range(100):
        next(results)
    (llm,) = stub.made
    assert 8 <= llm.llm_engine.most <= 8 + 2
    assert taken < 60
    running = list(llm.llm_engine.running)
    results.close()  # type: ignore[attr-defined]
    assert sorted(llm.llm_engine.aborted) == sorted(running)
    assert list(backend.sample([Work(PROMPTS[0], (0,))], SETTINGS))
    assert len(stub.made) == 1
    backend.close()


def test_what_cannot_be_started_is_named(stub: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"model: got 'broken'.*\(no such model\)"):
        VllmBackend("broken").load()
    with pytest.raises(InputError, match="gpu_memory_utilization"):
        VllmOptions(gpu_memory_utilization=1.5)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"tailcast\[vllm\]"):
        VllmBackend("m").load()


@pytest.mark.slow
def test_a_real_engine_answers_and_repeats_itself(vllm_python: Path, tmp_path: Path) -> None:
    """The command as a user of vLLM's environment runs it: all prompts, then the third one alone."""
    # Attention kernels want heads of at least 32.
    model = save_tiny_llama(tmp_path / "tiny-model", hidden_size=128, heads=4, kv_heads=2)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_id": f"p{i}", "prompt": f"w{i} w2 w3"} for i in range(5)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    command = [str(vllm_python), "-m", "data_gen.commands.gen_samples", str(prompts), "--model", str(model)]
    command += ["--backend", "vllm", "--num-samples", "4", "--max-tokens", "20", "--seed", "4"]
    command += ["--progress", "false", "--keep-text", "true"]
    command += ["--vllm.dtype", "float32", "--vllm.max-num-seqs", "16", "--vllm.enforce-eager", "true"]
    command += ["--vllm.gpu-memory-utilization", "0.3"]

    def sampled(name: str, *options: str) -> list[dict[str, Any]]:
        out = tmp_path / name
        environment = {**vllm_environment(), "PYTHONPATH": str(ROOT)}
        words = [*command, "--out", str(out), *options]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return read_samples(out).to_pylist()

    whole = sampled("all.parquet")
    keys = [(f"p{i}", index) for i in range(5) for index in range(4)]
    assert [(row["prompt_id"], row["sample_index"]) for row in whole] == keys
    for row in whole:
        assert (row["engine"], row["model"], row["prompt_tokens"]) == ("vllm", "tiny-model", 5)
        assert row["engine_version"]
        assert row["finish_reason"] in ("stop", "length")
        assert 1 <= row["output_tokens"] <= 20
        assert row["output_tokens"] == 20 or row["finish_reason"] == "stop"
        assert row["total_s"] >= row["ttft_s"] >= 0
    assert len({row["text"] for row in whole}) > 10
    again = sampled("third.parquet", "--skip", "2", "--limit", "1")
    for name in ("prompt_id", "sample_index", "output_tokens", "finish_reason", "text"):
        assert [row[name] for row in again] == [row[name] for row in whole[8:12]]


class VllmServer:
    """A vLLM server in a process group of its own, always on the same port; it takes minutes until it responds."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        self.port = free_port()
        self._command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        self._command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            options: dict[str, Any] = {"env": vllm_environment(), "start_new_session": True}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, **options)

    def kill(self) -> None:
        """SIGKILL to it and its engine processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def num_stored(out: Path) -> int:
    """Samples in the store, which another process may write to: of a copy, because the run locks the store itself."""
    store, copy = out.with_name(out.name + ".partial") / STORE_NAME, out.with_name("copy.sqlite")
    try:
        shutil.copy(store, copy)
        shutil.copy(f"{store}-wal", f"{copy}-wal")
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            query = "SELECT COUNT(*) FROM samples WHERE finish_reason != 'error'"
            return int(connection.execute(query).fetchone()[0])
    except (OSError, sqlite3.Error):
        return 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> None:
    """Looks again and again while the command runs."""
    assert eventually(lambda: process.poll() is not None or condition(), seconds), "took too long"
    assert process.poll() is None, "the command ended too soon"


@pytest.mark.slow
def test_a_run_outlives_command_and_server(vllm_python: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "samples.parquet", tmp_path / "command.log"
    # Converted once and kept in vLLM's environment.
    model_folder = packaged_model(vllm_python.parents[1] / "models" / MODEL)
    server = VllmServer(vllm_python, model_folder, tmp_path / "server.log")
    command = [sys.executable, "-m", "data_gen.commands.gen_samples", "templates:4?seed=1", "--out", str(out)]
    command += f"--backend openai --num_samples 4 --max_tokens {MAX_TOKENS} --seed 5 --keep_text true".split()
    command += f"--openai.base_urls [http://127.0.0.1:{server.port}/v1] --openai.concurrency 2".split()
    command += ["--progress", "false"]
    command += ["--openai.start_wait_s", "400", "--openai.server_wait_s", "400"]

    def begin() -> subprocess.Popen[bytes]:
        with open(log, "ab") as stream:
            return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream)

    server.start()
    running = begin()
    try:
        wait_until(lambda: num_stored(out) >= 3, running, 500)
        running.kill()
        running.wait()
        num_kept = num_stored(out)
        assert 3 <= num_kept < 16

        running = begin()
        wait_until(lambda: num_stored(out) >= num_kept + 3, running, 60)
        server.kill()
        num_kept = num_stored(out)
        assert num_kept < 16
        server.start()
        assert running.wait(500) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
        server.kill()

    rows = read_samples(out).to_pylist()
    assert len(rows) == len({(row["prompt_id"], row["sample_index"]) for row in rows}) == 16
    for row in rows:
        assert (row["engine"], row["model"]) == ("vllm", MODEL)
        assert row["finish_reason"] == "stop" or row["output_tokens"] == MAX_TOKENS
        assert 1 <= row["output_tokens"] <= MAX_TOKENS
        assert row["prompt_tokens"] > 10
        assert row["total_s"] > 0
    assert len({row["text"] for row in rows}) > 12, "the outputs of a prompt differ"
    report = json.loads(out.with_name(out.name + ".run.json").read_text())
    assert report["engine_counters"]["server_down"] >= 1
    assert "resuming" in log.read_text()
