"""Size and wording of the code base: `python benchmarks/house.py [--before REVISION]`.

Prints, for the working tree and optionally a revision, measures of product code, tests, benchmarks and documents,
with the goals of those that have one. A circle is a set of modules that import each other, or of modules and
folders of one package that do (the contract `acyclic_siblings` of import-linter refuses those). An option is a
field of a dataclass with a text below it, which is its help. Sleeps are calls of `sleep` in tests, except
`asyncio.sleep(0)`, which only yields. Subjects of commits count from REVISION on.
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
from itertools import pairwise
from pathlib import Path

import networkx

PACKAGES = ("predictors", "training", "data_gen", "export", "scheduler_core", "tailcast")
SMALL_LINES = 80
SUBJECT_CHARACTERS = 72
GOALS = {
    "product: lines": "44,000",
    "circles of modules": "0",
    "circles of modules and folders in a package": "0",
    "docs: words": "40,000",
    "docs/benchmarks.md: words": "4,000",
    "CHANGELOG.md: bytes": "8,192",
    "README: words": "1,000",
    "benchmarks: lines": "11,000",
    "tests: sleeps, without asyncio.sleep(0)": "0",
    f"commit subjects above {SUBJECT_CHARACTERS} characters": "0",
}
#: Names that do not describe what a variable holds.
_VARIABLES = re.compile("found|given|wanted|known|seen|kept|made|shown|told|asked|places?")
#: Non-standard terms in identifiers.
_WORDS = re.compile(
    "answers?|asked|told|seat|rooms?|cohort|nobody|grave|strangers|rival|judged|contender|subject|material|laws?"
    "|spread|capped|cap|cut|stretch(?:es)?|hears|beside|alone"
)
_PHRASES = re.compile(
    r"\b(who(?:ever)? is|nobody|somebody|is told|are told|says? (?:so|nothing|what|which|how)|cut answers?"
    r"|answers? (?:cut|that)|whole numbers?|do not fall|of its own accord|the user's word)\b",
    re.IGNORECASE,
)


def working_tree(root: Path) -> dict[str, str]:
    """Tracked Python and Markdown files of the working tree by path."""
    paths = subprocess.check_output(["git", "ls-files", "*.py", "*.md"], cwd=root, text=True).splitlines()
    return {path: (root / path).read_text(encoding="utf-8") for path in paths if (root / path).is_file()}


def revision_tree(root: Path, revision: str) -> dict[str, str]:
    """Python and Markdown files of a Git revision by path."""
    archive = subprocess.check_output(["git", "archive", revision], cwd=root)
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            if member.isfile() and member.name.endswith((".py", ".md")):
                content = tar.extractfile(member)
                assert content is not None
                files[member.name] = content.read().decode("utf-8")
    return files


def counts(files: Mapping[str, str]) -> dict[str, str]:
    """Measures of one tree by name."""
    python = {path: text for path, text in files.items() if path.endswith(".py") and "_pb2" not in path}
    product = {path: text for path, text in python.items() if path.split("/")[0] in PACKAGES}
    tests = {path: text for path, text in python.items() if path.startswith("tests/")}
    worded = {path: text for path, text in python.items() if not path.startswith(("tests/", "benchmarks/"))}
    benchmarks = [text for path, text in python.items() if path.startswith("benchmarks/")]
    documents = [text for path, text in files.items() if path.startswith("docs/") and path.endswith(".md")]
    lines = {path: text.count("\n") for path, text in product.items()}
    identifiers, phrases = _wording(worded)
    circles, sibling_circles = _circles(product)
    rows = {
        "product: lines": sum(lines.values()),
        "product: files": len(lines),
        "product: median lines of a file": round(statistics.median(lines.values())),
        f"product: modules below {SMALL_LINES} lines with one importer": len(_single_importer(product)),
        "circles of modules": len(circles),
        "circles of modules and folders in a package": len(sibling_circles),
        "documented options": _num_options(product),
        "non-standard identifiers": identifiers,
        "non-standard phrases in docstrings": phrases,
        "public class names used more than once": len(_repeated_classes(worded)),
        "tests: lines": sum(text.count("\n") for text in tests.values()),
        "tests: files": len(tests),
        "tests: sleeps, without asyncio.sleep(0)": sum(map(_num_sleeps, tests.values())),
        "benchmarks: lines": sum(text.count("\n") for text in benchmarks),
        "docs: words": sum(len(text.split()) for text in documents),
        "docs/benchmarks.md: words": len(files["docs/benchmarks.md"].split()),
        "CHANGELOG.md: bytes": len(files["CHANGELOG.md"].encode()),
        "README: words": len(files["README.md"].split()),
    }
    printed = {name: f"{value:,}" for name, value in rows.items()}
    for package in sorted({path.split("/")[0] for path in lines}):
        names = [path for path in lines if path.startswith(f"{package}/")]
        printed[f"{package}: lines (files)"] = f"{sum(lines[path] for path in names):,} ({len(names)})"
    return printed


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
            identifiers += bool(_VARIABLES.fullmatch(name)) or sum(map(bool, map(_WORDS.fullmatch, parts)))
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


def _imports(product: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of the product that it imports, in functions and for type checkers too."""
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in product}
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets = set()
        for node in ast.walk(ast.parse(product[path])):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                # `from package import module` uses the module, `from package import name` the package.
                targets |= names & set(modules) | ({node.module} if names - set(modules) else set())
        imports[module] = targets & set(modules) - {module}
    return imports


def _single_importer(product: Mapping[str, str]) -> list[str]:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, targets in _imports(product).items():
        for target in targets:
            importers[target].add(module)
    return sorted(
        path
        for path, text in product.items()
        if len(importers[path.removesuffix(".py").replace("/", ".")]) == 1 and text.count("\n") < SMALL_LINES
    )


def _circles(product: Mapping[str, str]) -> tuple[list[set[str]], list[set[str]]]:
    """Circles of modules, and circles of the members of one package."""
    edges = [(module, target) for module, targets in _imports(product).items() for target in targets]
    siblings = set()
    for module, target in edges:
        parts, others = module.split("."), target.split(".")
        depth = next(
            (depth for depth, pair in enumerate(zip(parts, others, strict=False)) if len(set(pair)) > 1), None
        )
        if depth is not None:
            siblings.add((".".join(parts[: depth + 1]), ".".join(others[: depth + 1])))
    return tuple(  # type: ignore[return-value]
        [each for each in networkx.strongly_connected_components(networkx.DiGraph(graph)) if len(each) > 1]
        for graph in (edges, siblings)
    )


def _num_options(product: Mapping[str, str]) -> int:
    return sum(
        isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        for source in product.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body)
    )


def _num_sleeps(text: str) -> int:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
    return sum(
        ast.unparse(call.func).split(".")[-1] == "sleep" and ast.unparse(call.args[0]) != "0"
        for call in calls
    )


def _long_subjects(root: Path, revision: str) -> int:
    log = ["git", "log", "--format=%s", f"{revision}..HEAD"]
    subjects = subprocess.check_output(log, cwd=root, text=True).splitlines()
    return sum(len(line) > SUBJECT_CHARACTERS for line in subjects)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="Git revision to compare with")
    parser.add_argument(
        "--list", action="store_true", help="list circles, small modules and repeated classes"
    )
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    files = working_tree(root)
    now = counts(files)
    before = {}
    if options.before:
        before = counts(revision_tree(root, options.before))
        name = f"commit subjects above {SUBJECT_CHARACTERS} characters"
        now[name] = str(_long_subjects(root, options.before))
    print(f"| measure |{' ' + options.before + ' |' if before else ''} working tree | goal |")
    print(f"| --- |{' ---: |' if before else ''} ---: | ---: |")
    for name, value in now.items():
        column = f" {before.get(name, '-')} |" if before else ""
        print(f"| {name} |{column} {value} | {GOALS.get(name, '')} |")
    if options.list:
        product = {
            path: text
            for path, text in files.items()
            if path.split("/")[0] in PACKAGES and path.endswith(".py") and "_pb2" not in path
        }
        for circle in (circle for circles in _circles(product) for circle in circles):
            print("circle:", ", ".join(sorted(circle)))
        print("\n".join(["", *_single_importer(product)]))
        print(", ".join(_repeated_classes(product)))


if __name__ == "__main__":
    main()
