"""Documents: links lead somewhere, commands have the options they are shown with, README stays short."""

import json
import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "*/README.md", "*/*/README.md", "examples/quickstart/data/README.md")
FILES = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]
DOCUMENTS = sorted(path for path in FILES if not {"out", "build"} & set(path.relative_to(ROOT).parts))
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link} in {document.relative_to(ROOT)}"
        if anchor:
            assert anchor in _anchors(target), f"{link} in {document.relative_to(ROOT)}"


def _commands() -> list[tuple[str, str]]:
    return [
        (document.name, line.strip())
        for document in (ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md")))
        for line in document.read_text(encoding="utf-8").splitlines()
        if line.startswith("    ") and line.split()[0] in SCRIPTS
    ]


@pytest.mark.parametrize(("document", "line"), _commands())
def test_commands_accept_what_documents_show(
    document: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name, *arguments = shlex.split(line)
    module, function = SCRIPTS[name].split(":")
    with pytest.raises(SystemExit) as end:
        getattr(import_module(module), function)([*arguments, "--print_config"])
    assert end.value.code == 0, capsys.readouterr().err


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 110
    assert len(text.split()) <= 1000


def test_readme_has_the_size_of_the_included_predictors_training() -> None:
    """It said 15,000 prompts long after they had become more."""
    manifest = json.loads(
        (ROOT / "predictors/pretrained/tailcast-minilm/manifest.json").read_text(encoding="utf-8")
    )
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [prompts, models] = re.findall(r"is trained on ([\d,]+) prompts.*? and (\d+) models", text)[0]
    assert prompts == f"{manifest['training_data']['num_prompts']['train']:,}"
    assert int(models) == len(manifest["served_models"])


def test_reference_pages_name_modules_that_exist() -> None:
    pages = (ROOT / "docs/reference").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert (
            find_spec(name)
            if attribute.islower() or not module
            else hasattr(import_module(module), attribute)
        )
