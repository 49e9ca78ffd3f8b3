"""Upper limit: throughput of ONNX Runtime alone, with one thread and different groupings of prompts.

Prints one JSON object: responses per CPU second for each grouping.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.service.prompts import make_prompts
from benchmarks.shared.command import Parser

WAYS = {
    "one by one": (1, 1),
    "32 in order of arrival": (32, 32),
    "fours of 32 sorted by length": (32, 4),
    "fours of 128 sorted by length": (128, 4),
}
"""Window that is sorted by length, and prompts per call."""


def groups(lengths: Sequence[int], window: int, size: int) -> Iterator[list[int]]:
    """Indices of the prompts of each call; sorted by length within each window if it has several calls."""
    for start in range(0, len(lengths), window):
        positions = list(range(start, min(start + window, len(lengths))))
        if window > size:
            positions.sort(key=lambda position: lengths[position])
        for first in range(0, len(positions), size):
            yield positions[first : first + size]


def measure(folder: Path, seconds: float, seed: int) -> dict[str, float]:
    """Responses per CPU second, about `seconds` per grouping, in turns of one window of 128 prompts."""
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    from shared_model import Model

    model = Model(str(folder), 1)
    pad = model.tokenizer.padding["pad_id"]
    model.tokenizer.no_padding()
    ids = [one.ids for one in model.tokenizer.encode_batch(make_prompts(2048, seed))]
    answered, used = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0.0)
    end = time.perf_counter() + seconds * len(WAYS)
    turn = 0
    while time.perf_counter() < end or not turn:
        part = [ids[(turn * 128 + position) % len(ids)] for position in range(128)]
        for way, (window, size) in WAYS.items():
            begin = time.process_time()
            for positions in groups([len(one) for one in part], window, size):
                longest = max(len(part[position]) for position in positions)
                rows = [part[position] + [pad] * (longest - len(part[position])) for position in positions]
                mask = [[1] * len(part[p]) + [0] * (longest - len(part[p])) for p in positions]
                model.run(rows, mask)
            used[way] += time.process_time() - begin
            answered[way] += len(part)
        turn += 1
    return {way: answered[way] / used[way] for way in WAYS}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(measure(options.artifact, options.seconds, options.seed)))


if __name__ == "__main__":
    main()
