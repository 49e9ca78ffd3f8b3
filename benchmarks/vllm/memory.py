"""The memory in front of a real vLLM: applications whose outputs are not as long as their prompts suggest, behind one name.

    make quickstart vllm-env
    python -m benchmarks.vllm.memory [--rounds 4] [--bursts 48] [--release 8]

Five applications send their requests to one engine (SmolLM2 on this machine) in bursts. Some stop at the end of a line or a
sentence, which the predictor does not know, so their outputs are short whatever the prompt asks for. Three proxies in front of
the same engine get the same bursts in turn: in the order of arrival, by a policy with predictions alone, and by the same policy
with online calibration. The first round is not counted; the proxies keep what they learn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from benchmarks.shared.processes import command_ports
from benchmarks.vllm.model import NAME, packaged_model
from benchmarks.vllm.server import MODEL, engine_server
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import kendall_tau

#: Prompts of the applications, and what ends their outputs.
APPLICATIONS: tuple[tuple[str, list[str]], ...] = (
    ("Write a long story about {}.", ["."]),
    ("Describe {} in detail, for a brochure.", []),
    ("Explain step by step how one learns about {}.", ["\n"]),
    ("List many facts about {}.", ["2."]),
    ("What is {}?", []),
)
TOPICS = (
    "rain",
    "chess",
    "Rome",
    "bread",
    "the moon",
    "a violin",
    "trains",
    "tea",
    "glass",
    "maps",
    "sleep",
    "salt",
)
MAX_TOKENS = 160
ARRIVAL = "in the order of arrival"


def sides_of(policy: str) -> dict[str, list[str]]:
    """Options of the proxies."""
    return {
        ARRIVAL: ["--policy", "fcfs"],
        f"{policy}, predictions alone": ["--policy", policy, "--online_calibration", "false"],
        f"{policy}, with the memory": ["--policy", policy],
    }


@dataclass(frozen=True, slots=True)
class Ended:
    """Latency of a request in seconds, and tokens of its output."""

    latency_s: float
    tokens: int


async def send(client: aiohttp.ClientSession, url: str, number: int, seed: int) -> Ended:
    """Sends one request of a burst, which has all applications in turn."""
    template, stop = APPLICATIONS[number % len(APPLICATIONS)]
    prompt = template.format(f"{TOPICS[(number * 7 + seed * 5) % len(TOPICS)]}, number {seed}")
    body: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS,
        "temperature": 0.7, "seed": seed * 1000 + number,
    }  # fmt: skip
    start = time.perf_counter()
    async with client.post(
        f"{url}/v1/chat/completions", json=body | ({"stop": stop} if stop else {})
    ) as response:
        content = await response.json()
    return Ended(time.perf_counter() - start, max(content["usage"]["completion_tokens"], 1))


async def burst(url: str, size: int, seed: int) -> list[Ended]:
    """All requests of a burst at once."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        return list(await asyncio.gather(*(send(client, url, number, seed) for number in range(size))))


def cells(rounds: Sequence[Sequence[Ended]], reference: Sequence[Sequence[Ended]]) -> list[str]:
    """Mean latency, its P90 and mean latency per token, each as a ratio to those of the same bursts in the order of arrival."""

    def numbers(ended: Sequence[Ended]) -> list[float]:
        latencies = np.array([one.latency_s for one in ended])
        per_token = latencies / np.array([one.tokens for one in ended])
        return [float(latencies.mean()), float(np.percentile(latencies, 90)), float(per_token.mean())]

    ratios = [
        np.array(numbers(ended)) / np.array(numbers(base))
        for ended, base in zip(rounds, reference, strict=True)
    ]
    return [mean_cell([ratio[column] for ratio in ratios]) for column in range(3)]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--out", type=Path, default=Path("out/vllm-memory"))
    parser.add_argument("--predictor", default="pretrained")
    parser.add_argument("--policy", default="ssjf")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bursts", type=int, default=48, help="requests of a burst")
    parser.add_argument("--release", type=int, default=8, help="slots of the engine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = packaged_model(options.python.parent.parent / "models" / NAME)
    sides = sides_of(options.policy)
    rounds: dict[str, list[list[Ended]]] = {side: [] for side in sides}
    with ExitStack() as stack:
        server = stack.enter_context(
            engine_server(
                options.python, model, options.out, "memory", max_num_seqs=options.release, settings=None
            )
        )
        urls = {}
        for side, words in sides.items():
            # Engine and predictor share the cores here, so predictions may be late.
            common = (
                "--predictor",
                options.predictor,
                "--release",
                str(options.release),
                "--deadline_s",
                "30",
                *words,
            )
            _, [port, *_] = stack.enter_context(command_ports("tailcast_proxy", server.url, *common))
            urls[side] = f"http://127.0.0.1:{port}"
        for number in range(options.rounds + 1):
            for side, url in urls.items():
                rounds[side].append(asyncio.run(burst(url, options.bursts, number)))
                mean = np.mean([one.latency_s for one in rounds[side][-1]])
                print(f"round {number}, {side}: mean latency {mean:.1f} s", flush=True)
    counted = {side: each[1:] for side, each in rounds.items()}
    reference = counted[ARRIVAL]
    lengths = np.array([[one.tokens for one in ended] for ended in reference], float)
    kinds = np.arange(options.bursts) % len(APPLICATIONS)
    medians = {
        template: int(np.median(lengths[:, kinds == kind])) for kind, (template, _) in enumerate(APPLICATIONS)
    }
    print("\nmedian tokens: " + "; ".join(f"{template} {tokens}" for template, tokens in medians.items()))
    means = [list(medians.values())[kind] for kind in kinds]
    print(
        f"Kendall's tau of the median of its application and the output: {kendall_tau(means * len(lengths), lengths.ravel()):.2f}\n"
    )
    header = ("order", "mean latency", "P90", "mean latency per token")
    print(markdown_table(header, [[side, *cells(each, reference)] for side, each in counted.items()]))


if __name__ == "__main__":
    main()
