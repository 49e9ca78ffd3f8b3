"""Size of the code base: `python benchmarks/house.py [--before REVISION] [--list]`.

Prints, for the working tree and optionally a revision, measures of product code, tests, benchmarks and documents,
with the goals of those that have one. A circle is a set of modules and folders of one package that import each other.
An option is a field of a dataclass with a text below it, which is its help. Sleeps are calls of `sleep` in tests,
except `asyncio.sleep(0)`, which only yields. Subjects of commits count from REVISION on.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import networkx

PACKAGES = ("predictors", "training", "data_gen", "export", "scheduler_core", "tailcast")
SMALL_LINES = 80
SUBJECT_CHARACTERS = 72
GOALS = {
    "product: lines": "44,000",
    "circles of modules and folders in a package": "0",
    "docs: words": "40,000",
    "docs/benchmarks.md: words": "4,000",
    "CHANGELOG.md: bytes": "8,192",
    "README: words": "1,000",
    "benchmarks: lines": "11,000",
    "tests: sleeps, without asyncio.sleep(0)": "0",
    f"commit subjects above {SUBJECT_CHARACTERS} characters": "0",
}


def working_tree(root: Path) -> dict[str, str]:
    """Tracked Python and Markdown files of the working tree by path."""
    paths = subprocess.check_output(["git", "ls-files", "*.py", "*.md"], cwd=root, text=True).splitlines()
    return {path: (root / path).read_text(encoding="utf-8") for path in paths if (root / path).is_file()}


def revision_tree(root: Path, revision: str) -> dict[str, str]:
    """Python and Markdown files of a Git revision by path."""
    archive = subprocess.check_output(["git", "archive", revision], cwd=root)
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        contents = {each.name: tar.extractfile(each) for each in tar if each.name.endswith((".py", ".md"))}
        return {name: file.read().decode() for name, file in contents.items() if file is not None}


def product_of(files: Mapping[str, str]) -> dict[str, str]:
    """The modules of the packages, without generated ones."""
    return {
        path: text
        for path, text in files.items()
        if path.split("/")[0] in PACKAGES and path.endswith(".py") and "_pb2" not in path
    }


def counts(files: Mapping[str, str]) -> dict[str, str]:
    """Measures of one tree by name."""
    product = product_of(files)
    tests, benchmarks, documents = (
        [text for path, text in files.items() if path.startswith(f"{folder}/") and path.endswith(ending)]
        for folder, ending in (("tests", ".py"), ("benchmarks", ".py"), ("docs", ".md"))
    )
    lines = {path: text.count("\n") for path, text in product.items()}
    rows = {
        "product: lines": sum(lines.values()),
        "product: files": len(lines),
        "product: median lines of a file": round(statistics.median(lines.values())),
        f"product: modules below {SMALL_LINES} lines with one importer": len(single_importer(product)),
        "circles of modules and folders in a package": len(circles(product)),
        "documented options": sum(map(num_options, product.values())),
        "tests: lines": sum(text.count("\n") for text in tests),
        "tests: files": len(tests),
        "tests: sleeps, without asyncio.sleep(0)": sum(map(num_sleeps, tests)),
        "benchmarks: lines": sum(text.count("\n") for text in benchmarks),
        "docs: words": sum(len(text.split()) for text in documents),
        "docs/benchmarks.md: words": len(files["docs/benchmarks.md"].split()),
        "CHANGELOG.md: bytes": len(files["CHANGELOG.md"].encode()),
        "README: words": len(files["README.md"].split()),
    }
    printed = {name: f"{value:,}" for name, value in rows.items()}
    for package in sorted(PACKAGES):
        numbers = [value for path, value in lines.items() if path.startswith(f"{package}/")]
        printed[f"{package}: lines (files)"] = f"{sum(numbers):,} ({len(numbers)})"
    return printed


def imports(product: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of the product that it imports, in functions and for type checkers too."""
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in product}
    imported: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets = set()
        for node in ast.walk(ast.parse(product[path])):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                # `from package import module` uses the module, `from package import name` the package.
                targets |= names & set(modules) | ({node.module} if names - set(modules) else set())
        imported[module] = targets & set(modules) - {module}
    return imported


def single_importer(product: Mapping[str, str]) -> list[str]:
    """Small modules that one other module imports."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, targets in imports(product).items():
        for target in targets:
            importers[target].add(module)
    return sorted(
        path
        for path, text in product.items()
        if len(importers[path.removesuffix(".py").replace("/", ".")]) == 1 and text.count("\n") < SMALL_LINES
    )


def circles(product: Mapping[str, str]) -> list[set[str]]:
    """Circles of the members of one package; a circle of modules is one of the members of some package."""
    edges = set()
    for module, targets in imports(product).items():
        for target in targets:
            parts, others = module.split("."), target.split(".")
            pairs = enumerate(zip(parts, others, strict=False))
            depth = next((depth for depth, pair in pairs if len(set(pair)) > 1), None)
            if depth is not None:
                edges.add((".".join(parts[: depth + 1]), ".".join(others[: depth + 1])))
    components = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return [each for each in components if len(each) > 1]


def num_options(source: str) -> int:
    """Fields of classes with a text below them."""
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return sum(
        isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        for node in classes
        for field, text in pairwise(node.body)
    )


def num_sleeps(source: str) -> int:
    """Calls of `sleep` that wait."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    return sum(
        ast.unparse(call.func).split(".")[-1] == "sleep" and ast.unparse(call.args[0]) != "0"
        for call in calls
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="Git revision to compare with")
    parser.add_argument("--list", action="store_true", help="list circles and small modules")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    files = working_tree(root)
    now, before = counts(files), {}
    if options.before:
        before = counts(revision_tree(root, options.before))
        log = ["git", "log", "--format=%s", f"{options.before}..HEAD"]
        subjects = subprocess.check_output(log, cwd=root, text=True).splitlines()
        name = f"commit subjects above {SUBJECT_CHARACTERS} characters"
        now[name] = str(sum(len(line) > SUBJECT_CHARACTERS for line in subjects))
    print(f"| measure |{' ' + options.before + ' |' if before else ''} working tree | goal |")
    print(f"| --- |{' ---: |' if before else ''} ---: | ---: |")
    for name, value in now.items():
        column = f" {before.get(name, '-')} |" if before else ""
        print(f"| {name} |{column} {value} | {GOALS.get(name, '')} |")
    if options.list:
        product = product_of(files)
        print(*(f"circle: {', '.join(sorted(circle))}" for circle in circles(product)), sep="\n")
        print(*single_importer(product), sep="\n")


if __name__ == "__main__":
    main()
