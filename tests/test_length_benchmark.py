"""The benchmark of length predictors: known scores of known forecasts, its streams, and one run on made-up data."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.lengths import __main__ as benchmark
from benchmarks.lengths import hazards, streams
from benchmarks.lengths.entrants import FINE, Histogram, OutlenBucket
from benchmarks.lengths.features import Features, lexical
from benchmarks.lengths.page import write_page
from benchmarks.lengths.scores import COVERAGE, LEVELS, NUM_LEVELS, pair_accuracy, run
from benchmarks.lengths.streams import Request, Streams
from benchmarks.lengths.trained import bucket_quantiles
from examples.pretrained.prepare import CHOICE, SET_ASIDE, SOURCES

PAGE = Path(__file__).parents[1] / "docs/length-benchmark.md"
FAMILIES = ("sums", "words")


class Oracle:
    """Knows the length, which the made-up prompts end with."""

    def __init__(self, features):
        self.num_observed = 0

    def predict(self, request):
        return np.full(len(LEVELS), math.log(int(request.prompt.rsplit(" ", 1)[1])))

    def observe(self, request, tokens):
        self.num_observed += 1


class Uniform:
    """ln X is uniform in (0, 1); or, as a rank, larger is longer."""

    def __init__(self, rank=False):
        self.rank = rank

    def predict(self, request):
        return float(request.prompt) if self.rank else np.array(LEVELS)

    def observe(self, request, tokens):
        pass


def write_data(folder, num_prompts=30):
    """The files of DATA, each with applications of two served models."""
    rng = np.random.default_rng(0)
    (folder / "more").mkdir()
    for name in (*CHOICE, *SET_ASIDE, *(Path(source.file).name for source in SOURCES)):
        rows = []
        for family in FAMILIES if name == streams.FAMILIES else ("one",):
            for number in range(num_prompts):
                for model, factor in (("a", 1), ("b", 4)):
                    tokens = factor * int(rng.integers(10, 400))
                    rows.append(
                        {
                            "prompt": f"{name} {family} {number} {model} {tokens}",
                            "dataset": family,
                            "model": model,
                            "n_tokens": tokens - 1,
                            "n_tokens_reasoning": 1,
                            "hidden_reasoning": False,
                        }
                    )
        table = pd.DataFrame(rows)
        if name == streams.FAMILIES:
            table["family"] = table.dataset
        table.to_parquet(folder / f"more/{name}.parquet")
    for part in ("train", "validation"):
        lengths = rng.integers(1, 900, (num_prompts, 10))
        prompts = [f"{part} {number}" for number in range(num_prompts)]
        rows = {"dataset": "d", "model": "m", "prompt": prompts, "output_tokens": list(lengths)}
        pd.DataFrame(rows).to_parquet(folder / f"castillo_{part}.parquet")


def share_prompts(folder):
    """Lets both served models answer the same prompts."""
    for file in (folder / "more").iterdir():
        table = pd.read_parquet(file)
        table["prompt"] = table.prompt.str.extract("(.*) [ab] ", expand=False)
        table.to_parquet(file)


def read_rows(file):
    with open(file, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_scores_of_a_uniform_distribution():
    rng = np.random.default_rng(1)
    logs = rng.random(20_000)
    stream = [(Request("p"), float(np.exp(value))) for value in logs]
    scores = run(Uniform(), stream).scores(np.arange(len(stream)))
    assert scores["tau"] is None
    assert scores["pairs"] == 0.5
    # CRPS of U(0, 1) against itself is 1/6, its mean pinball loss at level u is u (1 - u) / 2.
    assert scores["crps"] == pytest.approx(1 / 6, abs=0.003)
    assert scores["pinball_0.9"] == pytest.approx(0.045, abs=0.002)
    assert [scores[f"coverage_{level}"] for level in COVERAGE] == pytest.approx(COVERAGE, abs=0.01)


def test_a_ranker_has_only_scores_of_order():
    stream = [(Request(str(number)), 10 + number) for number in range(40)]
    result = run(Uniform(rank=True), stream)
    scores = result.windows()["0"]
    assert (scores["tau"], scores["pairs"], scores["crps"]) == (1.0, 1.0, None)
    assert pair_accuracy(np.array([1.0, 1.0, 3.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(5 / 6)
    assert pair_accuracy(np.ones(3), np.ones(3)) is None


def test_windows_begin_after_their_number_of_requests():
    stream = [(Request(str(number)), 1 + number) for number in range(260)]
    assert list(run(Uniform(rank=True), stream).windows()) == ["0", "50", "200"]


def test_quantiles_of_histograms_and_classes():
    histogram = Histogram(1e9, FINE)
    for tokens in (100, 100, 100, 1_000):
        histogram.add(tokens)
    median, high = histogram.quantiles()[[NUM_LEVELS, -1]]
    assert median == pytest.approx(math.log(100), abs=0.1)
    assert high == pytest.approx(math.log(1_000), abs=0.1)
    assert bucket_quantiles(np.array([0.5, 0.5]), np.array([0.0, 2.0, 6.0]))[NUM_LEVELS] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("thinks", "max_tokens", "tokens"),
    [(False, None, 1000), (True, None, 4096), (True, 1999, 1000), (True, 300, 100), (False, 50, 50)],
)
def test_outlen_bucket(thinks, max_tokens, tokens):
    forecast = OutlenBucket().predict(Request("p", thinks=thinks, max_tokens=max_tokens))
    assert np.exp(forecast[0]) == pytest.approx(tokens)


def test_lexical_features():
    features = lexical("Explain, in 20 words, why the function fails, and list the steps?")
    assert len(features) == 19
    assert features[:5] == [16.0, 1.0, 1.0, 1.0, 1.0]
    assert sum(features[7:]) == 1.0
    assert lexical("Hello")[6] == 1.0


def test_streams(tmp_path, monkeypatch):
    write_data(tmp_path)
    data = Streams(tmp_path)
    assert len(data.applications) == len(CHOICE) + len(SET_ASIDE) + len(FAMILIES)
    mixed = data.mixed(0, 5)
    assert len({request.application for request, _ in mixed}) == 5
    assert len({request.prompt for request, _ in mixed}) == len(mixed) == 5 * 30
    assert all(request.thinks and not request.served_model for request, _ in mixed)
    assert {request.served_model for request, _ in data.mixed(0, None, 3)} == {"a", "b"}
    monkeypatch.setattr(streams, "FLOOD_START", 50)
    flooded = data.flooded(0, "copies", tenants=True)
    odd = [(number, tokens) for number, (request, tokens) in enumerate(flooded) if request.tenant == "flood"]
    assert len(odd) == streams.FLOOD_SIZE
    assert min(odd)[0] >= 50
    assert {tokens for _, tokens in odd} == {streams.FLOOD_TOKENS}
    with pytest.raises(streams.InputError, match="DATA"):
        Streams(tmp_path / "none").mixed(0)


def test_a_swap_replaces_models_for_the_same_prompts(tmp_path, monkeypatch):
    write_data(tmp_path)
    share_prompts(tmp_path)
    monkeypatch.setattr(streams, "SWAP_AFTER", 100)
    one, other = (Streams(tmp_path).swapped(0, swap) for swap in (True, False))
    assert [request.prompt for request, _ in one] == [request.prompt for request, _ in other]
    assert one[100:] == other[100:]
    assert sum(tokens for _, tokens in one[:100]) < 0.5 * sum(tokens for _, tokens in other[:100])


def test_a_run_on_made_up_data(tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data", num_prompts=70)
    monkeypatch.setattr(streams, "MIN_ALONE", 60)
    monkeypatch.setitem(benchmark.MAX_SEEDS, "H", 1)
    names = ["tiny", "memory alone", "prompt length", "AIBrix", "llm-d", "Clair", "Oracle"]
    words = [
        str(tmp_path / "data"),
        "--streams",
        "M",
        "H",
        "--seeds",
        "1",
        "--cache",
        str(tmp_path / "cache"),
    ]
    words += ["--entrant", f"{__name__}:Oracle", "--only", *names, "--csv", str(tmp_path)]
    page, image = tmp_path / "page.md", tmp_path / "plot.svg"
    assert benchmark.main([*words, "--markdown", str(page), "--plot", str(image)]) == 0
    rows = read_rows(tmp_path / "length_benchmark_scores.csv")
    assert {row["entrant"] for row in rows} >= {
        "tiny, raw",
        "tiny, memory",
        "llm-d sketch, fine bins",
        "Oracle",
    }
    oracle = [row for row in rows if row["entrant"] == "Oracle"]
    assert [(row["tau"], row["pairs"], row["crps"]) for row in oracle] == [("1", "1", "0")] * 3
    ratios = [float(row["ratio"]) for row in read_rows(tmp_path / "length_benchmark_hazards.csv")]
    assert all(0.8 < ratio < 1.2 for ratio in ratios)
    assert "applications, each alone" in page.read_text()
    assert image.read_text().startswith("<svg")
    assert "tiny, memory" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("--artifact", "x"), ("--entrant", "no_module:X")])
def test_invalid_options_are_refused(option, value, tmp_path, capsys):
    assert benchmark.main([str(tmp_path), option, value]) == 2
    assert option in capsys.readouterr().err


def test_floods_and_swaps_are_compared_with_streams_without_them(tmp_path, monkeypatch):
    write_data(tmp_path)
    share_prompts(tmp_path)
    for module in (hazards, streams):
        monkeypatch.setattr(module, "SWAP_AFTER", 100)
        monkeypatch.setattr(module, "FLOOD_START", 100)
    monkeypatch.setattr(hazards, "SWAP_WINDOWS", (0, 50))
    monkeypatch.setattr(streams, "FLOOD_SIZE", 100)
    features = Features(Streams(tmp_path), tmp_path)
    rows = hazards.swap(features, 1) + hazards.flood(features, 1)
    assert [row["study"] for row in rows] == ["swap", "no swap"] * 2 + ["flood"] * 6
    assert rows[0]["memory"] > 1.2 * rows[1]["memory"]
    unknown, named = rows[6]["calibration"], rows[9]["calibration"]
    assert unknown > 1.1 * named
    write_page(tmp_path / "page.md", {"scores": [], "hazards": rows})
    assert "| flood: copies, tenants named |" in (tmp_path / "page.md").read_text()


def test_the_entrant_of_the_page_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope = {}
    exec(code, scope)
    entrant = next(value for name, value in scope.items() if name == "LatestOutputs")(None)
    stream = [(Request("p"), tokens) for tokens in [100] * 60]
    assert run(entrant, stream).windows()["0"]["pairs"] is None
    assert np.exp(entrant.predict(Request("p"))) == pytest.approx([100.0] * len(LEVELS))
