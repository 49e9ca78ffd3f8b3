"""Output-length predictors on streams of requests that none of them was trained on, each request predicted before its output.

    python -m benchmarks.lengths DATA [--streams M M32 L H flood swap] [--seeds 3] [--artifact NAME=FOLDER]
        [--entrant MODULE:CLASS] [--only NAME...] [--csv FOLDER] [--markdown docs/length-benchmark.md] [--plot FILE]

DATA: folder of public output lengths. Streams of requests in random order, each prompt once:
M: 24 applications behind one gateway, all with one served-model name; M32: the same with up to 32 names; L: all 84
applications, one name. H: each application alone. flood: M with 1,500 odd requests of another tenant. swap: M, whose served
models are replaced. --seeds: of M; M32, H, flood and swap have at most 3, L has one.

--artifact adds a predictor, --entrant a class of yours (see docs/length-benchmark.md). Slow features are kept in --cache.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.lengths.entrants import ENTRANTS, Entry, tailcast
from benchmarks.lengths.features import Features
from benchmarks.lengths.hazards import HAZARDS, Row
from benchmarks.lengths.page import plot, write_page
from benchmarks.lengths.scores import mean_scores, run
from benchmarks.lengths.streams import MIXED, Streams
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import number_cell
from scheduler_core.errors import InputError

MAX_SEEDS = {"M32": 2, "L": 1, "H": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 2 if an argument or file is invalid."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--streams", nargs="+", default=[*MIXED, *HAZARDS], choices=[*MIXED, *HAZARDS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--artifact", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--entrant", nargs="+", default=[], metavar="MODULE:CLASS")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="entrants whose name begins with one of these"
    )
    parser.add_argument("--cache", type=Path, default=Path("out/lengths"))
    parser.add_argument("--csv", type=Path, help="folder of the full tables")
    parser.add_argument("--markdown", type=Path, help="page whose tables are replaced")
    parser.add_argument("--plot", type=Path, help="SVG file")
    options = parser.parse_args(arguments)
    try:
        entries = _entries(options.artifact, options.entrant, options.only)
        features = Features(Streams(options.data), options.cache)
        tables: dict[str, list[Row]] = {"scores": [], "hazards": []}
        for name in options.streams:
            seeds = min(options.seeds, MAX_SEEDS.get(name, options.seeds))
            if name in MIXED:
                tables["scores"] += score(name, seeds, entries, features)
            else:
                tables["hazards"] += (rows := HAZARDS[name](features, seeds))
                for row in rows:
                    numbers = (number_cell(row[key]) for key in ("calibration", "memory", "ratio"))
                    print(" ", row["study"], row["case"], *numbers)
        for name, rows in tables.items():
            if options.csv and rows:
                _write_csv(options.csv / f"length_benchmark_{name}.csv", rows)
        if options.markdown:
            write_page(options.markdown, tables)
        if options.plot:
            plot(options.plot, tables["scores"])
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def score(stream: str, seeds: int, entries: Mapping[str, Entry], features: Features) -> list[Row]:
    """Scores of all entrants on a stream, printed as they come: a row for each entrant and window."""
    streams = [MIXED[stream](features.streams, seed) for seed in range(seeds)]
    prompts = [request.prompt for each in streams for request, _ in each]
    names = [name for entry in entries.values() for name in entry.features]
    if "pooled" in names:
        features.prepare(["pooled"], features.training()[0])
    features.prepare(names, prompts)
    print(f"\n{stream}, {len(streams[0])} requests, seeds: {seeds}; tau / CRPS after so many requests")
    rows: list[Row] = []
    for name, entry in entries.items():
        runs = [run(entry.make(features), each) for each in streams]
        windows = mean_scores([each.windows() for each in runs])
        predict_us = sum(each.predict_us for each in runs) / seeds
        cost: Row = {
            "predict_us": predict_us + sum(features.microseconds[each] for each in entry.features),
            "observe_us": sum(each.observe_us for each in runs) / seeds,
        }
        for window, scores in windows.items():
            numbers = {key: "" if value is None else value for key, value in scores.items()}
            rows.append({"stream": stream, "entrant": name, "after": window} | numbers | cost)
        cells = (f"{number_cell(each['tau'])}/{number_cell(each['crps'])}" for each in windows.values())
        print(f"{name:30}", "  ".join(cells), f"{cost['predict_us']:9.0f} us", flush=True)
    return rows


def _entries(
    artifacts: Sequence[str], classes: Sequence[str], only: Sequence[str] | None
) -> dict[str, Entry]:
    entries = dict(ENTRANTS)
    for pair in artifacts:
        name, is_pair, folder = pair.partition("=")
        if not is_pair:
            raise InputError("--artifact", pair, "NAME=FOLDER")
        entries |= tailcast(name, folder)
    for address in classes:
        module, _, name = address.partition(":")
        try:
            entries[name] = Entry(getattr(import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError("--entrant", address, f"MODULE:CLASS that can be imported ({error})") from error
    return {name: entry for name, entry in entries.items() if only is None or name.startswith(tuple(only))}


def _write_csv(file: Path, rows: Sequence[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            )


if __name__ == "__main__":
    sys.exit(main())
