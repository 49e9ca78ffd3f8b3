"""The scheduler inside a real vLLM, in vLLM's own environment (see tests/data_gen/conftest.py): minutes each."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.model import packaged_model
from tests.data_gen.conftest import ROOT, save_tiny_llama, vllm_environment, vllm_python  # noqa: F401
from tests.scheduler_core.adapters.length_reader import ORDERS, PREDICTED
from tests.waiting import eventually

pytestmark = pytest.mark.slow

LENGTHS = [55, 50, 45, 40, 35, 30, 25, 20, 15, 10, 5, 3, 50, 8, 44, 2, 33, 21, 9, 4]

ABORTED = ["r0", "r2", "r5", "r9", "r13", "r15", "r19"]

ENTRY_POINTS = """[tailcast.predictors]
prompted = tests.scheduler_core.adapters.length_reader:connect
grpc = predictors.client:GrpcPredictor
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention kernels want heads of at least 32."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), hidden_size=128, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process with vLLM, in which our modules and the tests' predictor are found as if installed."""
    folder = tmp_path_factory.mktemp("plugins")
    info = folder / "tailcast_tests-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tailcast-tests\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return {**vllm_environment(), "PYTHONPATH": f"{ROOT}:{folder}"}


@pytest.fixture
def served(vllm_python: Path, model: Path, environment: dict[str, str]) -> Any:  # noqa: F811
    """Runs engine_script.py with a task; what it printed."""

    def serve(tailcast: dict[str, Any] | None, **task: Any) -> Any:
        task = {"model": str(model), "tailcast": tailcast, "max_num_seqs": 3, "lengths": LENGTHS, **task}
        done = subprocess.run(
            [str(vllm_python), "-m", "tests.scheduler_core.adapters.engine_script", json.dumps(task)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        return json.loads(lines[0][7:]) if lines else done.stdout + done.stderr

    return serve


def test_preemption_order_and_outputs(served: Any) -> None:
    """Little memory, a policy that displaces: the order is another, the outputs are the same."""
    stock = served(None, blocks=5, at_once=4)
    ours = served({"policy": "srpt", "predictor": "prompted://answers"}, blocks=5, at_once=4, wait=True)
    assert ours["scheduler"] == ["TailcastScheduler", "PolicyScheduling", "AsyncScheduler"]
    assert ours["finished"] == stock["finished"], "greedy outputs do not depend on the order"
    assert len(ours["finished"]) == len(LENGTHS)
    check_order(ours, stock)
    assert ours["metrics"]["tailcast_displacements_total[]"] > 0


def check_order(ours: Any, stock: Any) -> None:
    order = list(ours["finished"])
    assert order != list(stock["finished"])
    assert order.index("r11") < order.index("r1")
    assert order[-1] == "r0", "the longest is the last"
    assert ours["preemptions"] > 0
    assert ours["scores_kept"]
    assert set(ours["left"].values()) == {0}


@pytest.mark.parametrize("policy", ORDERS)
def test_every_head_reaches_the_policy(served: Any, policy: str) -> None:
    task: dict[str, Any] = {
        "predicted": PREDICTED, "lengths": [60] * 6, "at_once": 6, "max_num_seqs": 1, "wait": True,
    }  # fmt: skip
    parameters = {"reserve": 0} if policy == "s3" else {}
    settings = {"policy": policy, "policy_parameters": parameters, "predictor": "prompted://answers"}
    result = served(settings, **task)
    assert result["metrics"]["tailcast_predictions_total['answered']"] == 6
    assert list(result["finished"]) == ORDERS[policy].split()


#: Requests from the least to the most urgent one.
CHATS = [
    "Nobody needs this: whenever you have nothing else to do, tag old log files with a topic. There is no deadline.",
    "Item 5,213 of 20,000 of tonight's labelling job: is this review positive or negative? 'Works as it should.'",
    "Write a short poem about autumn.",
    "I found my father on the floor. He is not breathing and has no pulse, what do I do until the ambulance is here?",
]


@pytest.mark.parametrize("predictor", ["pretrained+urgency", "pretrained+missing"])
def test_length_and_urgency_of_the_shipped_predictors(
    served: Any, predictor: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SmolLM2 in the engine: the urgency orders its chats. If the part of urgency fails, the lengths still arrive."""
    model = packaged_model(tmp_path_factory.getbasetemp() / "smollm2")
    settings: dict[str, Any] = {"policy": "hpjf", "policy_parameters": {"max_promotion": 5}}
    if predictor == "pretrained+missing":
        broken = tmp_path_factory.mktemp("broken")
        (broken / "manifest.json").write_text("{}")
        settings, predictor = {"policy": "sept"}, f"pretrained+{broken}"
    settings |= {"predictor": predictor, "timeout_s": 120}
    task: dict[str, Any] = {"chats": CHATS, "lengths": [4] * len(CHATS), "at_once": len(CHATS), "wait": True}
    options = {"max_model_len": 256, "max_num_batched_tokens": 256}
    result = served(settings, model=str(model), max_num_seqs=1, options=options, **task)
    assert isinstance(result, dict), result
    names = [f"r{number}" for number in range(len(CHATS))]
    assert sorted(result["finished"]) == names
    outcome = "partial" if "broken" in predictor else "answered"
    assert result["metrics"][f"tailcast_predictions_total['{outcome}']"] == len(CHATS)
    assert not [name for name in result["metrics"] if name.startswith("tailcast_failures_total")]
    if outcome == "partial":
        assert result["levels"] == {}
        return
    assert all(has_length for _, has_length in result["levels"].values())
    levels = [result["levels"][name][0] for name in names]
    assert levels[0] > levels[2] > levels[3] == 0
    order = [levels[names.index(name)] for name in result["finished"]]
    assert order == sorted(order)
    counts = {
        level: result["metrics"].get(f"tailcast_urgency_levels_total['{level}']", 0) for level in range(5)
    }
    assert sum(counts.values()) == len(CHATS)


def test_the_predictor_dies_and_requests_are_aborted(served: Any) -> None:
    result = served(
        {"policy": "tie", "predictor": "prompted://breaks:7"}, blocks=5, at_once=12, abort=ABORTED
    )
    assert {f"r{number}" for number in range(len(LENGTHS))} - set(result["finished"]) <= set(ABORTED)
    assert all(len(ids) == LENGTHS[int(name[1:])] for name, ids in result["finished"].items())
    assert result["metrics"]["tailcast_predictions_total['failed']"] > 0
    assert 0 < result["metrics"]["tailcast_predictions_total['answered']"] <= 7
    assert result["scores_kept"]
    assert set(result["left"].values()) == {0}


def test_steps_that_are_planned_before_the_one_before_has_its_tokens(served: Any) -> None:
    """Asynchronous scheduling: vLLM's real AsyncScheduler under our order, on a platform that does not execute so."""
    task: dict[str, Any] = {"pipelined": True, "blocks": 5, "at_once": 4}
    stock, ours = served(None, **task), served({"policy": "srpt", "predictor": "prompted://answers"}, **task)
    for one in (stock, ours):
        assert one["engine_says"] is False, "vLLM switches it off on CPUs, although it is requested"
        assert one["finished"] == {f"r{number}": length for number, length in enumerate(LENGTHS)}
        assert one["pipelined"] > one["steps"] // 2
        assert set(one["left"].values()) == {0}
    check_order(ours, stock)


#: Policy of each batch former, and options of the engine.
FORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunked_prefill": ("trail", {}),
    "orca": ("ssjf", {}),
    "quantile_reserve": ("ssjf", {}),
    "rad": ("fcfs", {}),
    "rad_prefill_first": ("fcfs", {}),
    "request_level": ("fcfs", {}),
    "slai": (
        "fcfs",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ),
    "stage_aware": ("semantic", {}),
    "uniboost": ("uniboost", {}),
    "vllm": ("priority", {}),
}


@pytest.fixture(scope="module")
def stock_outputs() -> dict[bool, dict[str, list[int]]]:
    """For the outputs of vLLM's own scheduler by request; True: of requests that ignore EOS."""
    return {}


@pytest.mark.parametrize("former", sorted(FORMERS))
def test_each_former_in_the_engine(
    served: Any, former: str, stock_outputs: dict[bool, dict[str, list[int]]]
) -> None:
    """Little memory, prefix caching, aborts and a predictor that dies: outputs are those of vLLM's own scheduler."""
    policy, options = FORMERS[former]
    speculates = "speculative_config" in options
    if speculates not in stock_outputs:
        stock_outputs[speculates] = served(None, blocks=9, at_once=8, speculates=speculates)["finished"]
    settings: dict[str, Any] = {"policy": policy, "batching": former, "predictor": "prompted://breaks:7"}
    if former.startswith("rad"):
        settings["batching_parameters"] = {"t_row": 16, "t_col": 3, "t_red": 8}
    options = {"enable_prefix_caching": True, **options}
    result = served(settings, blocks=9, at_once=8, abort=ABORTED, options=options, speculates=speculates)
    assert isinstance(result, dict), result
    assert {f"r{number}" for number in range(len(LENGTHS))} - set(result["finished"]) <= set(ABORTED)
    for name, ids in result["finished"].items():
        assert ids == stock_outputs[speculates][name], name
    assert not [name for name in result["metrics"] if name.startswith("tailcast_failures_total")]
    assert set(result["left"].values()) == {0}


def test_a_former_that_cannot_plan_for_the_engine_is_refused(served: Any) -> None:
    output = served({"policy": "fcfs", "batching": "orca"}, at_once=1, options={"max_num_batched_tokens": 64})
    assert isinstance(output, str)
    assert "batching orca: tokens of request longest to process in one step" in output
    assert "raise --max-num-batched-tokens or lower --max-model-len" in output


def test_a_bad_configuration_stops_the_engine_with_its_reason(served: Any) -> None:
    output = served({"policy": "tyre"}, at_once=1)
    assert isinstance(output, str)
    assert "InputError: policy: got 'tyre'; allowed: fcfs, " in output


class Server:
    """`serve-predictor` or vLLM's OpenAI server, in a process group of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with open(log, "ab") as stream:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @contextmanager
    def stopped(self, title: str) -> Iterator[None]:
        """Meanwhile those of its processes whose titles begin so (15 characters at most) stand still."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                head, _, tail = stat.read_text().rpartition(")")
                group = int(tail.split()[2])
                if group == self._process.pid and head.partition("(")[2].startswith(title):
                    found.append(int(stat.parent.name))
        assert found, f"no process {title} of {self._process.args}"
        try:
            for pid in found:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in found:
                os.kill(pid, signal.SIGCONT)

    def wait(self, condition: Any, seconds: float) -> None:
        holds = eventually(lambda: self._process.poll() is not None or condition(), seconds)
        assert holds, self.log.read_text()[-3000:]
        assert self._process.poll() is None, self.log.read_text()[-3000:]


def test_a_served_engine_shows_its_metrics_and_outlives_the_predictor(
    vllm_python: Path,  # noqa: F811
    model: Path,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """The real service is killed while requests are under way: all are answered, and /metrics tells."""
    from tests.predictors.fakes import write_artifact

    port_file, artifact = tmp_path / "port", write_artifact(tmp_path / "artifact")
    service = Server(
        [sys.executable, "-m", "predictors.commands.serve_predictor", str(artifact), "--port", "0", "--port_file", str(port_file)],
        dict(os.environ), tmp_path / "service.log",
    )  # fmt: skip
    engine = None
    try:
        service.wait(port_file.exists, 120)
        config = tmp_path / "tailcast.yaml"
        config.write_text(
            f"policy: tie\npredictor: grpc://127.0.0.1:{port_file.read_text().strip()}\ntimeout_s: 0.5\n"
        )
        (tmp_path / "metrics").mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        url = f"http://127.0.0.1:{port}"
        options = f"--model {model} --served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32"
        options += " --max-model-len 96 --enforce-eager --max-num-seqs 2"
        options += " --scheduler-cls scheduler_core.adapters.vllm.TailcastScheduler"
        command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", *options.split()]
        variables = {"TAILCAST_CONFIG": str(config), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
        engine = Server(command, environment | variables, tmp_path / "engine.log")
        engine.wait(lambda: answers(f"{url}/health"), 600)

        def ask(number: int) -> int:
            body = {
                "model": "tiny", "prompt": f"w{number} w2 w3", "max_tokens": 80, "ignore_eos": True, "temperature": 0,
                "vllm_xargs": {"tailcast_tier": 100 if number == 0 else 1},
            }  # fmt: skip
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                return int(json.load(response)["usage"]["completion_tokens"])

        with ThreadPoolExecutor(24) as threads:
            # One by one until a prediction is there: the first ones may be later than a request takes.
            answered = 'tailcast_predictions_total{status="answered"}'
            engine.wait(lambda: ask(99) == 80 and metric(url, answered) > 0, 120)
            first = [threads.submit(ask, number) for number in range(24)]
            service.kill()
            rest = [threads.submit(ask, number) for number in range(24, 48)]
            assert [found.result() for found in (*first, *rest)] == [80] * 48
        assert metric(url, 'tailcast_predictions_total{status="failed"}') > 0
        assert metric(url, 'tailcast_bad_hints_total{hint="tailcast_tier"}') == 1
        assert 'policy="tie"' in page(url)
        assert "vllm:num_requests_running" in page(url), "vLLM's own are there, too"
    finally:
        service.kill()
        if engine is not None:
            engine.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return str(response.read().decode())


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page(url), re.MULTILINE)
    return float(found[1]) if found else 0.0
