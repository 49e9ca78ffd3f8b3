"""import-urgency: any mix of labelled texts in, one Parquet file out; the seed set keeps what docs/urgency.md promises of it."""

import json
import re
from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.commands.import_urgency import main
from data_gen.filters import NearDuplicates, normalized
from data_gen.urgency import seed_set
from data_gen.urgency.labels import read_labels, text_split
from data_gen.urgency.seed_set import with_phrases
from predictors.modules.heads import URGENCY_LEVELS
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS

MAPPING = "critical=interactive,high=interactive,medium=standard,low=batch,very_low=background"
ALL = {part: seed_set.seed_rows(part) for part in seed_set.PARTS}
EVERY_TEXT = [seed for part in ALL.values() for seed in part]
PAIRS = seed_set.read_pairs()


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    texts = ["Server down\\n\\nPlease look", "Rechnung fehlt", "Frage zum Vertrag"]
    texts += ["Rechnung fehlt", "Merci pour tout"]
    labels = ["critical", "medium", "low", "high", "very_low"]
    table = pa.table({"text": texts, "label": labels, "language": ["en", "de", "de", "de", "fr"]})
    pq.write_table(table, tmp_path / "tickets.parquet")
    return tmp_path / "tickets.parquet"


def test_the_seed_set_is_written_with_its_levels_and_splits(tmp_path: Path) -> None:
    out = tmp_path / "seed.parquet"
    assert main([str(out), "--sources", "llm,quiet,triage"]) == 0
    texts = read_labels(out)
    assert texts == [text for part in ("llm", "quiet", "triage") for text in seed_set.seed_labels(part)]
    assert pq.read_schema(out).metadata[b"schema"] == b"urgency/1"
    report = json.loads((tmp_path / "seed.parquet.run.json").read_text())
    assert report["num_texts"] == len(texts)
    assert report["by_level"]["emergency"] == sum(text.level == 0 for text in texts)


def test_labels_of_a_file_are_mapped_to_levels_and_weighted(tmp_path: Path, tickets: Path) -> None:
    out = tmp_path / "mix.parquet"
    mapping = MAPPING.replace("critical=interactive", "critical=0")
    options = ["--levels", mapping, "--weights", "labels=0.5,llm=2"]
    assert main([str(out), "--sources", f"llm,labels={tickets}", *options]) == 0
    texts = read_labels(out)
    of_file = [text for text in texts if text.source == tickets.name]
    assert [(text.level, text.language) for text in of_file] == [(0, "en"), (2, "de"), (3, "de"), (4, "fr")]
    assert {text.weight for text in of_file} == {0.5}
    assert {text.weight for text in texts if text.source == "seed-llm"} == {2.0}


def test_of_a_text_in_two_sources_the_first_label_counts(tmp_path: Path) -> None:
    seed = seed_set.seed_labels("llm")[0]
    own = tmp_path / "own.csv"
    own.write_text(f'text,level,weight\n"{seed.text}",background,\nA text of our own,1,2.5\n')
    out = tmp_path / "mix.parquet"
    assert main([str(out), "--sources", f"llm,labels={own}"]) == 0
    found = {text.text: text for text in read_labels(out)}
    assert found[seed.text].level == seed.level
    own_text = found["A text of our own"]
    assert (own_text.level, own_text.weight, own_text.split) == (1, 2.5, text_split(own_text.text))
    assert json.loads((tmp_path / "mix.parquet.run.json").read_text())["num_repeated"] == 1


@pytest.mark.parametrize(("option", "claimed"), [("--augment-claims", True), ("--augment-openers", False)])
def test_phrases_are_added_to_training_texts_alone(tmp_path: Path, option: str, claimed: bool) -> None:
    out = tmp_path / "train.parquet"
    assert main([str(out), option, "2"]) == 0
    plain = {text.text: text for text in seed_set.seed_labels("llm") + seed_set.seed_labels("quiet")}
    copies = [text for text in read_labels(out) if text.text not in plain]
    levels = {text.text: text.level for text in plain.values() if text.split == "train"}
    assert Counter(text.split for text in copies) == {"train": 2 * len(levels)}
    assert {text.claimed for text in copies} == {claimed}
    phrases = [phrase.phrase for phrase in (seed_set.read_claims() if claimed else seed_set.read_openers())]
    for text in copies:
        origins = [text.text.removeprefix(f"{phrase} ") for phrase in phrases]
        origins += [text.text.removesuffix(f" {phrase}") for phrase in phrases]
        assert text.level in {levels[origin] for origin in origins if origin in levels}


def test_the_same_seed_adds_the_same_claims() -> None:
    texts, claims = seed_set.seed_labels("llm"), seed_set.read_claims()
    generators = map(np.random.default_rng, (1, 1, 2))
    first, again, other = (with_phrases(texts, claims, 1, each, claimed=True) for each in generators)
    assert first == again != other


def test_splits_and_limit_leave_texts_out(tmp_path: Path, tickets: Path) -> None:
    out = tmp_path / "some.parquet"
    assert main([str(out), "--sources", f"labels={tickets}", "--levels", MAPPING, "--limit", "2"]) == 0
    assert len(read_labels(out)) == 2
    assert main([str(out), "--splits", "validation", "--overwrite", "true"]) == 0
    assert {text.split for text in read_labels(out)} == {"validation"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sources", "poems"], "sources: got 'poems'"),
        (["--sources", "labels"], "labels=FILE"),
        (["--sources", "labels=missing.parquet"], "sources: got 'missing.parquet'"),
        (["--splits", "dev"], "splits: got 'dev'"),
        (["--levels", "low=1", "--sources", "labels={tickets}"], "row 1, column label: got 'critical'"),
        (["--weights", "llm=much"], "weights, llm: got 'much'"),
        (["--augment-claims", "1000"], "augment_claims: got 1000"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, tickets: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    out = tmp_path / "out.parquet"
    assert main([str(out), *(word.format(tickets=tickets) for word in options)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "also level"),
        ({"text": ["a"], "level": ["soon"]}, "row 1, column level: got 'soon'"),
        ({"text": ["a", " "], "level": [1, 2]}, "row 2, column text"),
        ({"text": ["a"], "level": [1], "weight": [-1.0]}, "row 1, column weight: got -1.0"),
        ({"text": ["a"], "level": [1], "split": ["dev"]}, "row 1, column split: got 'dev'"),
        ({"text": [], "level": []}, "rows: got 0"),
    ],
)
def test_a_file_of_labels_is_checked(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    path = tmp_path / "own.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(InputError, match=message):
        read_labels(path)


@pytest.mark.parametrize(
    ("part", "total", "smallest", "ratio"), [("llm", 500, 100, 1.2), ("triage", 150, 30, 9)]
)
def test_there_are_many_texts_of_every_level(part: str, total: int, smallest: int, ratio: float) -> None:
    counts = Counter(seed["level"] for seed in ALL[part])
    assert set(counts) == set(LEVELS) == set(URGENCY_LEVELS)
    assert sum(counts.values()) >= total
    assert smallest <= min(counts.values()) <= max(counts.values()) <= ratio * min(counts.values())


def test_quiet_emergencies_are_emergencies_without_loud_words() -> None:
    quiet = ALL["quiet"]
    assert len(quiet) >= 40
    assert {seed["level"] for seed in quiet} == {"emergency"}
    loud = re.compile(r"urgen|emergenc|dringend|notfall|priorit|!!", re.IGNORECASE)
    assert [seed["id"] for seed in quiet if loud.search(seed["text"])] == []


def test_ids_are_unique_and_no_two_texts_nearly_the_same() -> None:
    ids = [seed["id"] for seed in EVERY_TEXT] + [pair.id for pair in PAIRS]
    assert len(set(ids)) == len(ids)
    index = NearDuplicates(0.7)
    texts = [seed["text"] for seed in EVERY_TEXT] + [pair.text for pair in PAIRS]
    assert [text for text in texts if not index.add(normalized(text))] == []


def test_extra_texts_are_for_training_alone() -> None:
    counts = Counter(seed["level"] for seed in ALL["extra"])
    assert set(counts) == set(LEVELS)
    assert {seed["split"] for seed in ALL["extra"]} == {"train"}
    assert sum(seed["language"] != "en" for seed in ALL["extra"]) > 250


@pytest.mark.parametrize("part", sorted(set(seed_set.PARTS) - {"extra"}))
def test_splits_are_the_hash_of_the_text_and_every_level_is_in_each(part: str) -> None:
    by_stratum: Counter[tuple[str, str]] = Counter()
    for seed in ALL[part]:
        assert seed["split"] == text_split(seed["text"]), seed["id"]
        by_stratum[seed["level"], seed["split"]] += 1
    for level in {seed["level"] for seed in ALL[part]}:
        total = sum(by_stratum[level, split] for split in ("train", "validation", "test"))
        assert 0.5 <= by_stratum[level, "train"] / total <= 0.75, level
        fewest = min(by_stratum[level, "validation"], by_stratum[level, "test"])
        assert fewest >= (14 if part == "llm" else 3), level


def test_pairs_differ_by_their_claim_alone() -> None:
    assert len(PAIRS) >= 150
    for pair in PAIRS:
        assert pair.position in ("before", "middle", "after")
        assert pair.claim in pair.claimed_text
        assert pair.claimed_text.replace(pair.claim, " ", 1).split() == pair.text.split(), pair.id
        assert pair.level_number > 0, "an emergency cannot be raised"
        assert pair.split in ("validation", "test")
    assert len({pair.language for pair in PAIRS}) >= 8
    assert min(Counter(pair.level for pair in PAIRS).values()) >= 30
    assert min(Counter(pair.position for pair in PAIRS).values()) >= 15
    assert seed_set.read_pairs("test") == [pair for pair in PAIRS if pair.split == "test"]


def plain(phrase: str) -> str:
    return re.sub(r"[\W_]+", " ", phrase.casefold()).strip()


def test_phrases_for_training_are_none_of_those_for_tests() -> None:
    text = PAIRS[0].text
    openers = {plain(opener.phrase) for opener in seed_set.read_openers()}
    assert len(openers) >= 80
    rows = resources.files("data_gen.urgency.seed").joinpath("neutral.jsonl").read_text(encoding="utf-8")
    control = {plain(json.loads(row)["phrase"]) for row in rows.splitlines()}
    assert control
    assert not openers & control
    assert {opener.added_to(text).startswith(text) for opener in seed_set.read_openers()} == {True, False}
    claims = {plain(claim.phrase) for claim in seed_set.read_claims()}
    assert len(claims) >= 40
    assert not claims & {plain(pair.claim) for pair in PAIRS} - {""}
    for pair, neutral in zip(PAIRS, seed_set.neutral_texts(PAIRS), strict=True):
        assert pair.claim not in neutral
        assert neutral not in (pair.text, pair.claimed_text)
