"""The results of five papers beside ours.

    python -m benchmarks.reproduce [STUDY ...] [--quick] [--seeds 3] [--data FOLDER] [--predictions FILE]
                                   [--out out/reproduce] [--markdown docs/reproduction.md]

Each study prints the paper's value, ours, their ratio, and whether the effect points the same way, and keeps its findings
under --out; --markdown writes the page of all studies whose findings are there. --list names them and what they cost.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from importlib import metadata
from pathlib import Path

from benchmarks.reproduce import multitier, rad, semantic, slai, tie, uniboost
from benchmarks.reproduce.page import load, page, save, section
from benchmarks.reproduce.study import Effort, Study

STUDIES: tuple[Study, ...] = (
    *multitier.STUDIES,
    *semantic.STUDIES,
    *slai.STUDIES,
    *rad.STUDIES,
    *uniboost.STUDIES,
    *tie.STUDIES,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce", description=__doc__.split("\n")[0]
    )
    parser.add_argument("studies", nargs="*", help="studies or papers (default: all)")
    parser.add_argument("--quick", action="store_true", help="small versions, under two minutes in all")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each simulation")
    parser.add_argument("--data", type=Path, help="folder of public length sets and traces")
    parser.add_argument(
        "--predictions", type=Path, help="trace with predictions of a trained artifact, for TIE"
    )
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"), help="where findings are kept")
    parser.add_argument("--markdown", type=Path, help="write the page of all findings that are there")
    parser.add_argument(
        "--page-only", action="store_true", help="run nothing: write the page of what is there"
    )
    parser.add_argument("--list", action="store_true", help="name the studies and what they cost")
    return parser


def main() -> int:
    """Entry point; returns the exit code."""
    given = _parser().parse_args()
    if given.list:
        for study in STUDIES:
            print(f"{study.name:<22}{study.cost_s[0]:>6.0f} {study.cost_s[1]:>8.0f} CPU s   {study.title}")
        return 0
    names = {study.name for study in STUDIES} | {study.name.split("-")[0] for study in STUDIES}
    unknown = [name for name in given.studies if name not in names]
    if unknown:
        print(f"STUDY: got {unknown[0]!r}; allowed: {', '.join(sorted(names))}", file=sys.stderr)
        return 2
    effort = Effort(quick=given.quick, num_seeds=given.seeds, data=given.data, predictions=given.predictions)
    for study in () if given.page_only else STUDIES:
        if (
            given.studies
            and study.name not in given.studies
            and study.name.split("-")[0] not in given.studies
        ):
            continue
        start = time.process_time()
        findings = study.run(effort)
        about = {
            "command": f"python -m benchmarks.reproduce {study.name}" + (" --quick" if given.quick else ""),
            "version": metadata.version("tailcast"),
            "date": datetime.date.today().isoformat(),
            "cpu_s": time.process_time() - start,
            "quick": given.quick,
        }
        save(given.out / f"{study.name}.json", findings, about)
        print("\n".join(section(study, findings, about)), flush=True)
    if given.markdown is not None:
        kept = [(study, given.out / f"{study.name}.json") for study in STUDIES]
        parts = [(study, *load(path)) for study, path in kept if path.exists()]
        given.markdown.write_text(page(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
