"""Size and wording of the code base: `python benchmarks/house.py [--before REVISION]`.

Prints, for the working tree and optionally a revision, the lines and files of product code and tests, small
modules with one importer, non-standard names, repeated public class names, and the size of the README.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("predictors", "training", "data_gen", "export", "scheduler_core", "tailcast")
SMALL_LINES = 80
#: Names that do not describe what a variable holds.
_VARIABLES = {
    "found",
    "given",
    "wanted",
    "known",
    "seen",
    "kept",
    "made",
    "shown",
    "told",
    "asked",
    "place",
    "places",
}
#: Non-standard terms in identifiers.
_WORDS = {
    "answer",
    "answers",
    "asked",
    "told",
    "seat",
    "room",
    "rooms",
    "cohort",
    "nobody",
    "grave",
    "strangers",
    "rival",
    "judged",
    "contender",
    "subject",
    "material",
    "law",
    "laws",
    "spread",
    "capped",
    "cap",
    "cut",
    "stretch",
    "stretches",
    "hears",
    "beside",
    "alone",
}
_PHRASES = re.compile(
    r"\b(who(?:ever)? is|nobody|somebody|is told|are told|says? (?:so|nothing|what|which|how)|cut answers?"
    r"|answers? (?:cut|that)|whole numbers?|do not fall|of its own accord|the user's word)\b",
    re.IGNORECASE,
)


def working_tree(root: Path) -> dict[str, str]:
    """Tracked files of the working tree by path."""
    paths = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).split("\n")
    return {
        path: (root / path).read_text(encoding="utf-8")
        for path in paths
        if path.endswith((".py", "README.md")) and (root / path).is_file()
    }


def revision_tree(root: Path, revision: str) -> dict[str, str]:
    """Files of a Git revision by path."""
    archive = subprocess.check_output(["git", "archive", revision], cwd=root)
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            if member.isfile() and member.name.endswith((".py", "README.md")):
                content = tar.extractfile(member)
                assert content is not None
                files[member.name] = content.read().decode("utf-8")
    return files


def counts(files: Mapping[str, str]) -> dict[str, str]:
    """Measures of one tree by name."""
    python = {path: text for path, text in files.items() if path.endswith(".py") and "_pb2" not in path}
    product = {
        path: text for path, text in python.items() if path.startswith(tuple(f"{p}/" for p in PACKAGES))
    }
    tests = {path: text for path, text in python.items() if path.startswith("tests/")}
    worded = {path: text for path, text in python.items() if not path.startswith(("tests/", "benchmarks/"))}
    lines = {path: text.count("\n") for path, text in product.items()}
    identifiers, phrases = _wording(worded)
    rows = {
        "product: lines": f"{sum(lines.values()):,}",
        "product: files": f"{len(lines):,}",
        "product: median lines of a file": f"{statistics.median(lines.values()):.0f}",
        f"product: modules below {SMALL_LINES} lines with one importer": str(len(_single_importer(product))),
        "tests: lines": f"{sum(text.count(chr(10)) for text in tests.values()):,}",
        "tests: files": f"{len(tests):,}",
        "non-standard identifiers": f"{identifiers:,}",
        "non-standard phrases in docstrings": f"{phrases:,}",
        "public class names used more than once": str(len(_repeated_classes(worded))),
        "README: lines": f"{files['README.md'].count(chr(10)):,}",
        "README: words": f"{len(files['README.md'].split()):,}",
    }
    for package in sorted({path.split("/")[0] for path in lines}):
        names = [path for path in lines if path.startswith(f"{package}/")]
        rows[f"{package}: lines (files)"] = f"{sum(lines[path] for path in names):,} ({len(names)})"
    return rows


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _wording(files: Mapping[str, str]) -> tuple[int, int]:
    identifiers = phrases = 0
    for text in files.values():
        tree = ast.parse(text)
        for name in _names(tree):
            parts = re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", name).lower())
            identifiers += 1 if name in _VARIABLES else sum(part in _WORDS for part in parts)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                phrases += len(_PHRASES.findall(ast.get_docstring(node) or ""))
    return identifiers, phrases


def _repeated_classes(files: Mapping[str, str]) -> list[str]:
    names = Counter(
        node.name
        for text in files.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def _single_importer(product: Mapping[str, str]) -> list[str]:
    modules = {path[:-3].replace("/", "."): path for path in product if not path.endswith("__init__.py")}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path, text in product.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for target in targets:
                if target in modules:
                    importers[target].add(path)
    return sorted(
        path
        for module, path in modules.items()
        if len(importers[module]) == 1 and product[path].count("\n") < SMALL_LINES
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="Git revision to compare with")
    parser.add_argument("--list", action="store_true", help="list the small modules and the repeated classes")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    files = working_tree(root)
    now = counts(files)
    before = counts(revision_tree(root, options.before)) if options.before else {}
    print(f"| measure |{' ' + options.before + ' |' if before else ''} working tree |")
    print(f"| --- |{' ---: |' if before else ''} ---: |")
    for name, value in now.items():
        print(f"| {name} |{' ' + before.get(name, '-') + ' |' if before else ''} {value} |")
    if options.list:
        product = {path: text for path, text in files.items() if path.split("/")[0] in PACKAGES}
        product = {
            path: text for path, text in product.items() if path.endswith(".py") and "_pb2" not in path
        }
        print("\n" + "\n".join(_single_importer(product)))
        print(", ".join(_repeated_classes(product)))


if __name__ == "__main__":
    main()
