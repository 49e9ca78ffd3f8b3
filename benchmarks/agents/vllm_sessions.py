"""Real vLLM on the CPU under agents whose contexts exceed its KV memory: orders in its plugin and through the proxy.

    make vllm-env
    python -m benchmarks.agents.vllm_sessions [--sessions 16] [--turns 6] [--rounds 1] [--out runs.json]

Each session is a client in a closed loop over HTTP: it sends its context, reads the stream of the output, waits for
`--pause_s` (its tool), appends output and tool result, and sends the next turn. All sessions begin at once. Contexts
are different in each round, so that nothing of a former round is a hit. The sides of a round run one after the other on the
same texts, each with its own engine, which is stopped (SIGSTOP) while others run.

| side | what |
| --- | --- |
| vllm | vLLM 0.32 as it is: first come, first served, prefix caching, least recently used blocks evicted |
| NAME | the policy NAME in the plugin |
| proxy:NAME | `tailcast-proxy --policy NAME` in front of vLLM as it is |

Turns per second count from the start to the end of the last session; a session's completion from the start. The hit rate is
that of vLLM's own metrics: tokens of prompts found in the prefix cache, of all tokens of prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from benchmarks.shared.processes import ROOT, Process, command_ports
from benchmarks.vllm.model import NAME, packaged_model
from benchmarks.vllm.server import MODEL, openai_server, settings_file
from scheduler_core.report.page import markdown_table
from scheduler_core.shell.files import write_json

SIDES = ("vllm", "hrrn", "working_set", "proxy:working_set")
#: Maximum number of requests that an engine runs at once, more than there are sessions; memory is the limit.
MAX_NUM_SEQS = 64
#: Each is one token of SmolLM2 after a space.
WORDS = re.findall(
    "[a-z]+",
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were
    all her she there would their we him been has when who will no more if out so up said what its about than into them can only
    other time new some could these two may first then do any like my now over such our man me even most made after also did
    many off before must well back through years much where your way down should because long each just state those people too
    mean how little world very good make work own see men day get here old life both between being under three know
    """,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a session; times in seconds from the start of the run."""

    session: int
    turn: int
    sent_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Loop:
    """Sessions in a closed loop.

    Attributes:
        first_tokens, turn_tokens: Words of the first context, and of each tool result.
        output_tokens: Tokens of each output.
        pause_s: From the end of an output to the next turn.
    """

    sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    pause_s: float

    async def run(self, url: str, seed: int) -> list[Turn]:
        """Runs all sessions to their ends."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
            begin = time.monotonic()
            jobs = [self._session(client, url, number, seed, begin) for number in range(self.sessions)]
            return [turn for turns in await asyncio.gather(*jobs) for turn in turns]

    async def _session(
        self, client: aiohttp.ClientSession, url: str, number: int, seed: int, begin: float
    ) -> list[Turn]:
        rng = np.random.default_rng([seed, number])

        def text(num: int) -> str:
            return " ".join(rng.choice(WORDS, num))

        messages = [{"role": "user", "content": f"{seed} {number} {text(self.first_tokens)}"}]
        turns = []
        for turn in range(self.turns):
            body = {
                "model": MODEL, "messages": messages, "max_tokens": self.output_tokens, "ignore_eos": True,
                "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            sent, first, output, prompt_tokens = time.monotonic() - begin, 0.0, "", 0
            headers = {"x-session-id": f"{seed}-{number}"}
            async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    for choice in event.get("choices", ()):
                        if choice["delta"].get("content"):
                            output += choice["delta"]["content"]
                            first = first or time.monotonic() - begin
                    prompt_tokens = (event.get("usage") or {}).get("prompt_tokens") or prompt_tokens
            end = time.monotonic() - begin
            if not prompt_tokens:
                raise RuntimeError(f"session {number}, turn {turn}: the stream of the output ended early")
            turns.append(Turn(number, turn, sent, first or end, end, prompt_tokens))
            messages += [
                {"role": "assistant", "content": output},
                {"role": "user", "content": text(self.turn_tokens)},
            ]
            await asyncio.sleep(self.pause_s)
        return turns


@contextmanager
def engine(options: argparse.Namespace, policy: str | None, folder: Path) -> Iterator[tuple[str, Process]]:
    """A vLLM server with a small KV memory; yields its address and process. `policy` None: vLLM's own scheduler."""
    words = ["--max-model-len", "2048", "--max-num-seqs", str(MAX_NUM_SEQS), "--enable-prefix-caching"]
    words += ["--num-gpu-blocks-override", str(options.blocks), "--block-size", str(options.block_size)]
    environment = {"PYTHONPATH": str(ROOT)}
    if policy is not None:
        words += ["--scheduler-cls", "scheduler_core.adapters.vllm.TailcastScheduler"]
        environment |= settings_file(folder / f"{policy}.json", {"policy": policy})
    with openai_server(options.vllm_python, options.model, words, environment) as started:
        yield started


def prefix_cache(url: str) -> np.ndarray:
    """vLLM's counters of prefix-cache hits and queries, in tokens."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        page = response.read().decode()
    names = ("hits", "queries")
    lines = [
        re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", page, re.MULTILINE) for name in names
    ]
    return np.array([sum(map(float, values)) for values in lines])


def run_side(
    url: str, side: str, loop: Loop, seed: int, options: argparse.Namespace
) -> tuple[list[Turn], float]:
    """Turns of a run and the hit rate."""
    before = prefix_cache(url)
    if side.startswith("proxy:"):
        words = [url, "--policy", side.removeprefix("proxy:"), "--predictor", "none"]
        words += ["--release", str(MAX_NUM_SEQS), "--admin_port", "0"]
        with command_ports("tailcast_proxy", *words) as (_, ports):
            turns = asyncio.run(loop.run(f"http://127.0.0.1:{ports[0]}", seed))
    else:
        turns = asyncio.run(loop.run(url, seed))
    hits, queries = prefix_cache(url) - before
    return turns, float(hits / queries)


def measures(turns: Sequence[Turn], hit_rate: float) -> dict[str, float]:
    """The columns of the table."""
    ttft = np.array([turn.first_token_s - turn.sent_s for turn in turns])
    ends: dict[int, float] = {}
    for turn in turns:
        ends[turn.session] = max(ends.get(turn.session, 0.0), turn.end_s)
    done = np.array(list(ends.values()))
    return {
        "turns/s": len(turns) / done.max(),
        "TTFT mean, s": ttft.mean(),
        "P50": float(np.percentile(ttft, 50)),
        "P99": float(np.percentile(ttft, 99)),
        "max": ttft.max(),
        "session mean, s": done.mean(),
        "session max": done.max(),
        "hits": hit_rate,
    }


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """A row for each side, with means over the rounds."""
    columns = list(next(iter(runs.values()))[0])
    rows = [
        (side, *(mean_cell([run[name] for run in values]) for name in columns))
        for side, values in runs.items()
    ]
    return markdown_table(("order", *columns), rows)


def main() -> None:
    """Runs all sides round by round and prints the table after each run."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; default: the packaged SmolLM2")
    parser.add_argument("--vllm_python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--sides", nargs="+", default=SIDES)
    for name, value in (("sessions", 16), ("turns", 6), ("rounds", 1), ("blocks", 90), ("block_size", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("first_tokens", 1120), ("turn_tokens", 50), ("output_tokens", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--pause_s", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the turns of all runs")
    options = parser.parse_args()
    options.model = options.model or packaged_model(options.vllm_python.parents[1] / "models" / NAME)
    names = ("sessions", "turns", "first_tokens", "turn_tokens", "output_tokens", "pause_s")
    loop = Loop(**{name: getattr(options, name) for name in names})
    results: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
    raw: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines: dict[str | None, tuple[str, Process]] = {}
        for number in range(options.rounds):
            for side in options.sides:
                policy = None if side == "vllm" or side.startswith("proxy:") else side
                if policy in engines:
                    engines[policy][1].resume()
                else:
                    engines[policy] = stack.enter_context(engine(options, policy, folder))
                url, process = engines[policy]
                # The sides that share an engine have different texts.
                seed = options.seed + 1000 * number + (500 if side.startswith("proxy:") else 0)
                turns, hit_rate = run_side(url, side, loop, seed, options)
                process.pause()
                results[side].append(measures(turns, hit_rate))
                raw.append({"side": side, "round": number, "turns": [asdict(turn) for turn in turns]})
                if options.out is not None:
                    write_json(options.out, raw)
                tokens = np.mean([turn.prompt_tokens for turn in turns])
                print(
                    f"\n{loop.sessions} sessions of {loop.turns} turns, prompts of {tokens:,.0f} tokens in the mean, ",
                    end="",
                )
                print(f"{options.blocks * options.block_size:,} tokens of KV memory, {number + 1} rounds:\n")
                print(table({name: values for name, values in results.items() if values}), flush=True)


if __name__ == "__main__":
    main()
