"""Comparison with the results of five papers.

    python -m benchmarks.reproduce [STUDY ...] [--quick | --scale 0.25] [--seeds 3] [--data FOLDER] [--predictions FILE]
                                   [--missing] [--out out/reproduce] [--markdown docs/reproduction]

Each study prints the paper's value, ours, and whether both effects have the same direction, and
saves its findings under --out. --markdown writes the pages of all studies with saved findings, at any scale.
--missing skips studies with findings of this scale or a larger one, to resume an interrupted run. --list
prints the studies and their cost. The pages in docs/reproduction are made from --out
benchmarks/results/reproduction: run a study with this option and write the pages again.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import tomllib
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path

from benchmarks.reproduce.page import load, pages, save, section
from benchmarks.reproduce.study import Effort, Findings, Study
from benchmarks.shared.command import Parser
from scheduler_core.errors import InputError


def _function(path: str) -> Callable[[Effort], Findings]:
    """The function `module.name` of a study."""
    module, _, name = path.partition(".")
    function: Callable[[Effort], Findings] = getattr(import_module(f"benchmarks.reproduce.{module}"), name)
    return function


with Path(__file__).with_name("studies.toml").open("rb") as _file:
    STUDIES = tuple(
        Study(name=name, **texts | {"run": _function(texts["run"])})
        for name, texts in tomllib.load(_file).items()
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("studies", nargs="*", help="studies or papers (default: all)")
    parser.add_argument("--quick", action="store_true", help="small versions, some minutes in total")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of requests and of --seeds")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each simulation at scale 1")
    parser.add_argument("--data", type=Path, help="folder of public length sets and traces")
    parser.add_argument(
        "--predictions", type=Path, help="output of benchmarks.reproduce.predict: trained predictors for TIE"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only studies without findings of this scale or a larger one"
    )
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"), help="folder for findings")
    parser.add_argument("--markdown", type=Path, help="folder for the pages of all saved findings")
    parser.add_argument("--page_only", action="store_true", help="only write the pages of saved findings")
    parser.add_argument("--list", action="store_true", help="list the studies and their cost")
    return parser


def _options(effort: Effort) -> str:
    """The options that affect the numbers, without folders."""
    text = " --quick" if effort.quick else f" --scale {effort.scale:g}" if effort.scale < 1 else ""
    text += "" if effort.data is None else " --data FOLDER"
    return text + ("" if effort.predictions is None else " --predictions FILE")


def _is_kept(path: Path, effort: Effort) -> bool:
    """Whether findings of this scale, or of a larger one, exist."""
    if not path.exists():
        return False
    _, about = load(path)
    if about["quick"] or effort.quick:
        return effort.quick
    return bool(about["scale"] >= effort.scale)


def main() -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args()
    if options.list:
        for study in STUDIES:
            quick_s, full_s = study.cost_s
            scaled_s = max(quick_s, full_s * options.scale * max(1, round(options.seeds * options.scale)) / 3)
            print(f"{study.name:<22}{quick_s:>6.0f} {scaled_s:>8.0f} CPU s   {study.title}")
        return 0
    names = {study.name for study in STUDIES} | {study.name.split("-")[0] for study in STUDIES}
    unknown = [name for name in options.studies if name not in names]
    if unknown:
        print(f"STUDY: got {unknown[0]!r}; allowed: {', '.join(sorted(names))}", file=sys.stderr)
        return 2
    try:
        effort = Effort(
            quick=options.quick,
            scale=options.scale,
            num_seeds=options.seeds,
            data=options.data,
            predictions=options.predictions,
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    for study in () if options.page_only else STUDIES:
        if (
            options.studies
            and study.name not in options.studies
            and study.name.split("-")[0] not in options.studies
        ):
            continue
        if options.missing and _is_kept(options.out / f"{study.name}.json", effort):
            continue
        start = time.process_time()
        findings = study.run(effort)
        about = {
            "command": f"python -m benchmarks.reproduce {study.name}{_options(effort)}",
            "version": metadata.version("tailcast"),
            "date": datetime.date.today().isoformat(),
            "cpu_s": time.process_time() - start,
            "quick": effort.quick,
            "scale": effort.scale,
            "num_seeds": len(effort.seeds),
        }
        save(options.out / f"{study.name}.json", findings, about)
        print("\n".join(section(study, findings, about)), flush=True)
    if options.markdown is not None:
        files = [(study, options.out / f"{study.name}.json") for study in STUDIES]
        parts = [(study, *load(path)) for study, path in files if path.exists()]
        options.markdown.mkdir(parents=True, exist_ok=True)
        for name, text in pages(parts).items():
            (options.markdown / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
