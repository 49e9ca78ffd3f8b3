"""The metamorphic tests of predictors: the pairs, known scores of known predictions, and one run."""

import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.metamorphic.__main__ import main, markdown, predicted_medians, score_table
from benchmarks.metamorphic.suite import CONTROLS, LANGUAGES, PAIRS, Pair, pair_of, read_pairs, scores_of
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
SUITE = read_pairs()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of a JSON value that are no containers, with where they are."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def test_the_suite_has_kinds_topics_and_languages() -> None:
    ordered = [pair for pair in SUITE if pair.group != CONTROLS]
    topics = Counter((pair.kind, pair.language) for pair in ordered)
    assert min(topics.values()) >= 8
    kinds = Counter(language for _, language in topics)
    assert kinds["en"] >= 20
    assert all(kinds[language] >= 8 for language in LANGUAGES)
    assert 2 * len(SUITE) <= 900, "the slowest predictor takes 0.1 s a request"


def test_no_pair_is_there_twice_or_is_another_with_another_amount() -> None:
    bodies = [json.dumps(body, sort_keys=True) for pair in SUITE for body in (pair.short, pair.long)]
    assert len(set(bodies)) == len(bodies)
    lines = re.findall(r"^.*\{.*\|.*\}.*$", PAIRS.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [re.sub(r"\{[^{}]*\|[^{}]*\}", "{}", line) for line in lines if not line.startswith("#")]
    assert len(set(lines)) == len(lines) == len(SUITE)


def test_pairs_differ_in_one_place() -> None:
    for pair in SUITE:
        short, long = dict(leaves(pair.short)), dict(leaves(pair.long))
        assert short.keys() == long.keys(), pair
        assert sum(short[path] != long[path] for path in short) == 1, pair
        assert pair.short["messages"][-1]["role"] == "user", pair


def test_amounts_grow() -> None:
    for kind in {pair.kind for pair in SUITE}:
        factors = [pair.factor for pair in SUITE if pair.kind == kind]
        assert all(factor is None for factor in factors) or all(factor and factor > 1 for factor in factors)
    assert sum(pair.factor is not None for pair in SUITE) > len(SUITE) / 2


def test_pairs_are_for_evaluation_only() -> None:
    """Neither the product nor what trains predictors imports the suite or names its file."""
    paths = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT, text=True
    ).splitlines()
    others = [path for path in paths if not path.startswith(("tests/", "benchmarks/metamorphic/"))]
    assert len(others) > 200
    for path in others:
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        assert PAIRS.name not in text, path
        if "metamorphic" in text:
            imports = [
                node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            assert not any("metamorphic" in ast.unparse(node) for node in imports), path


def test_a_line_is_a_pair_of_requests() -> None:
    line = (
        'system: Be {brief|thorough}. // n = 2 // Hi // assistant: Hello // user: And {you}? // x = {"y": {}}'
    )
    pair = pair_of(line, "style", "g", "en")
    assert pair.short == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And {you}?"},
        ],
        "n": 2,
        "x": {"y": {}},
    }
    assert pair.long["messages"][0]["content"] == "Be thorough."
    assert pair.factor is None


@pytest.mark.parametrize(
    ("line", "factor"),
    [
        ("{5|50} facts", 10),
        ("{100|1,000} words", 10),
        ("{150|1.500} Wörter", 10),
        ("{40-60|400 to 600} words", 10),
        ("{two|fifteen|7.5} sentences", 7.5),
        ("{30-second|5-minute|10} talk", 10),
        ("{a tweet|2 pages}", None),
    ],
)
def test_factors_of_amounts(line: str, factor: float | None) -> None:
    assert pair_of(line, "k", "g", "en").factor == factor


@pytest.mark.parametrize("line", ["5 facts", "{5|50} facts in {2|3} words"])
def test_a_line_that_is_no_pair_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="one {SHORT|LONG}"):
        pair_of(line, "k", "g", "en")


def pairs(*factors: float | None, group: str = "g") -> list[Pair]:
    return [Pair("k", group, "en", {}, {}, factor) for factor in factors]


def test_scores_of_known_medians() -> None:
    medians = np.array([[10.0, 20.0], [10.0, 10.0], [30.0, 10.0], [10.0, 80.0]])
    scores = scores_of(pairs(100.0, 10.0, 10.0, None), medians)
    assert (scores.num, scores.right) == (4, 0.5)  # equal medians are wrong
    assert scores.ratio == pytest.approx(np.sqrt(2))  # median of 1/3, 1, 2, 8
    assert scores.per_ten == pytest.approx(1.0)  # median of 2 ** 0.5, 1, 1/3
    assert scores_of(pairs(None), medians[:1]).per_ten is None


def test_controls_have_no_order() -> None:
    medians = np.array([[10.0, 20.0], [40.0, 10.0], [10.0, 10.0]])
    controls = pairs(None, None, None, group=CONTROLS)
    scores = scores_of(controls, medians)
    assert scores.right is None
    assert scores.ratio == pytest.approx(2.0)
    table = score_table(controls + pairs(10.0), {"p": np.vstack([medians, [[1.0, 3.0]]])}, "group")
    assert table["all"]["p"] == table["g"]["p"]
    assert "| controls | 3 | - | 2.00 | - |" in markdown(table)
    assert "| English | 1 | 100 | 3.00 | 3.00 |" in markdown(table)


def test_requests_are_predicted_as_they_are_served() -> None:
    runtime = open_runtime("tiny")
    bodies = [pair.long for pair in SUITE if pair.kind in ("words", "min_tokens")]
    medians = predicted_medians(runtime, bodies)
    single = [predicted_medians(runtime, [body])[0] for body in bodies[::10]]
    np.testing.assert_array_equal(medians[::10], single)
    forced = [
        (body["min_tokens"], median)
        for body, median in zip(bodies, medians, strict=True)
        if "min_tokens" in body
    ]
    assert len(forced) == 8
    assert all(median >= 0.999 * minimum for minimum, median in forced)
    model = runtime.artifact.manifest.served_models[0]
    assert not np.array_equal(predicted_medians(runtime, bodies, model), medians)
    with pytest.raises(InputError, match=r"--served_model: got 'no-model'"):
        predicted_medians(runtime, bodies, "no-model")


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "scores.json", tmp_path / "page.md"
    assert main(["one=tiny", "two=tiny", "--json", str(file), "--markdown", str(page)]) == 0
    output = capsys.readouterr().out
    assert all(
        f"| {kind} |" in output for kind in (*(pair.kind for pair in SUITE), *LANGUAGES.values(), "all")
    )
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["scores"]["all"]["one"] == content["scores"]["all"]["two"]
    assert len(content["pairs"]) == len(SUITE)
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 12
    assert rows[0].count("two:") == 2


@pytest.mark.parametrize(
    ("words", "message"), [(["tiny"], "NAME=FOLDER"), (["a=tiny", "--served_model", "x"], "--served_model")]
)
def test_invalid_arguments_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
