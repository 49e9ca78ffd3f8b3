"""From prompts to predictions: the tokenizer and the runtime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from predictors.artifact import open_artifact, write_manifest
from predictors.manifest import Conditions
from predictors.runtime import CPU, open_runtime
from predictors.tokenizer import MAX_CHARS_PER_TOKEN, PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.fakes import VOCAB, WORDS, expected_rich, write_artifact, write_rich_artifact

MAX_LENGTH = 8
PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a a", "unknown words", "sea"]


def whole_text(folder: Path, text: str, side: str) -> list[int]:
    """The reference: tokenise everything, then truncate."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if side != "middle":
        tokenizer.enable_truncation(MAX_LENGTH, direction=side)
    ids: list[int] = tokenizer.encode(text).ids
    if side == "middle" and len(ids) > MAX_LENGTH:
        return ids[: MAX_LENGTH // 2] + ids[-MAX_LENGTH // 2 :]
    return ids


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@given(words=st.lists(st.sampled_from(WORDS), max_size=60), gap=st.sampled_from([" ", "  ", "\n", " " * 40]))
def test_text_truncation_is_exact(artifact_folder: Path, side: str, words: list[str], gap: str) -> None:
    text = gap.join(words)
    if len(text) > MAX_CHARS_PER_TOKEN * MAX_LENGTH:
        words = words[:10]
        text = gap.join(words)
    path = artifact_folder / "tokenizer.json"
    [prompt] = PromptTokenizer(path, max_length=MAX_LENGTH, truncation_side=side)([text])
    assert prompt.ids.tolist() == whole_text(artifact_folder, text, side)
    assert prompt.truncated == (len(words) + 2 > MAX_LENGTH)


class CountingTokenizer:
    """Counts the characters that reach the real tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str]) -> object:
        self.num_chars += sum(len(text) for text in texts)
        return self.tokenizer.encode_batch_fast(texts)


@pytest.mark.parametrize("side", ["right", "middle"])
@pytest.mark.parametrize("text", ["a " * 5_000_000, "x" * 10_000_000, " " * 10_000_000, "\n" * 10_000_000])
def test_work_on_a_huge_prompt_is_bounded(artifact_folder: Path, text: str, side: str) -> None:
    path = artifact_folder / "tokenizer.json"
    tokenize = PromptTokenizer(path, max_length=MAX_LENGTH, truncation_side=side)
    counting = CountingTokenizer(tokenize._tokenizer)
    tokenize._tokenizer = counting  # type: ignore[assignment]
    [prompt] = tokenize([text])
    # Cuts are doubled, and ends that share no gap with the rest are read once more together.
    assert counting.num_chars <= 3 * MAX_CHARS_PER_TOKEN * MAX_LENGTH
    assert prompt.truncated
    assert len(prompt.ids) <= MAX_LENGTH


def test_padding_stored_in_the_file_is_not_applied(artifact_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(artifact_folder / "tokenizer.json"))
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenize = PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="right")
    assert len(tokenize(["name three a"])[0].ids) == 5


def test_bad_file_and_bad_length_are_named(artifact_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer"):
        PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="right")
    with pytest.raises(InputError, match="max_length: got 2"):
        PromptTokenizer(artifact_folder / "tokenizer.json", max_length=2, truncation_side="right")


def with_parts(source: Path, target: Path, **parts: Any) -> Path:
    """A tokenizer.json with other parts."""
    target.write_text(json.dumps(json.loads(source.read_text()) | parts))
    return target


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


AMBIGUOUS = [
    r"(a+)+$",
    r"(a|aa)*b",
    r"((a+))+",
    r"(?:a?)*c",
    r"(a*){20}",
    r"(\s*x)+",
    r"(a|a){2,}",
    r"(?i:(a{1,3}))+",
    r"([)]+)+",
    r"(\)+)+",
]
KNOWN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?|(?=(\d{3})+(?!\d))| {2,}|[!#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][a-z]+",
)


# Such a tokenizer.json panicked or hung with the first prompt that its expression was made for.
@pytest.mark.mend
def test_regular_expressions_of_exponential_time_are_refused(artifact_folder: Path, tmp_path: Path) -> None:
    source, target = artifact_folder / "tokenizer.json", tmp_path / "tokenizer.json"
    for pattern in AMBIGUOUS:
        replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
        for parts in (
            {"pre_tokenizer": split(pattern)},
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("a"), split(pattern)]}},
            {"normalizer": {"type": "Sequence", "normalizers": [replace]}},
        ):
            with pytest.raises(InputError, match="regular expressions without repeated groups"):
                PromptTokenizer(with_parts(source, target, **parts), max_length=8, truncation_side="right")
    for pattern in KNOWN:
        path = with_parts(source, target, pre_tokenizer=split(pattern))
        PromptTokenizer(path, max_length=8, truncation_side="right")


@pytest.mark.mend
def test_too_much_backtracking_is_an_error_of_the_prompt(artifact_folder: Path, tmp_path: Path) -> None:
    """A panic of the package tokenizers is no Exception: it ended whatever thread or task it came to."""
    path = with_parts(
        artifact_folder / "tokenizer.json", tmp_path / "t.json", pre_tokenizer=split("a*a*a*a*a*a*a*$")
    )
    tokenize = PromptTokenizer(path, max_length=100, truncation_side="right")
    with pytest.raises(TailcastError, match="the tokenizer failed: .*retry-limit"):
        tokenize(["a" * 500 + "b"])
    assert tokenize(["sea"])[0].num_tokens > 2


# A chain of replacements made gigabytes of one character, and ended the start.
@pytest.mark.mend
def test_replacements_that_lengthen_a_text_without_bound_are_refused(
    artifact_folder: Path, tmp_path: Path
) -> None:
    tenfold = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    chains: list[dict[str, Any]] = [
        {"normalizer": {"type": "Sequence", "normalizers": [tenfold] * 9}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [bytewise] * 40}},
    ]
    for parts in chains:
        path = with_parts(artifact_folder / "tokenizer.json", tmp_path / "tokenizer.json", **parts)
        with pytest.raises(InputError, match="replacements that lengthen a text at most 256 times"):
            PromptTokenizer(path, max_length=8, truncation_side="right")
    path = with_parts(artifact_folder / "tokenizer.json", tmp_path / "tokenizer.json", normalizer=tenfold)
    PromptTokenizer(path, max_length=8, truncation_side="right")


@pytest.mark.parametrize("batch_size", [1, 2, 4, 32])
def test_all_heads_follow_prompt_served_model_and_temperature(rich_folder: Path, batch_size: int) -> None:
    names = ["tiny-llm", "huge-llm", None, "never heard of", "", "huge-llm"]
    temperatures = [0.5, None, 1.0, 0.0, float("nan"), 2.0]
    found = open_runtime(rich_folder).predict(PROMPTS, names, temperatures, batch_size=batch_size)
    assert len(found) == 6
    for row, one in enumerate(found.rows()):
        number = {"tiny-llm": 1, "huge-llm": 2}.get(names[row] or "", 0)
        wanted = expected_rich(PROMPTS[row], number, np.nan_to_num(temperatures[row] or 0.0))
        for name, value in wanted.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, err_msg=name)
            np.testing.assert_array_equal(getattr(found, name)[row], one[name])


def test_bad_conditions_are_named(rich_folder: Path, artifact_folder: Path) -> None:
    rich, plain = open_runtime(rich_folder), open_runtime(artifact_folder)
    for runtime, served_models, temperatures, message in (
        (rich, None, [-1.0], "temperature: got -1"),
        (rich, None, [float("inf")], "temperature: got inf"),
        (rich, ["tiny-llm"] * 2, None, "served_models: got '2 entries'; allowed: 1"),
        (rich, None, [], "temperatures: got '0 entries'; allowed: 1"),
        (plain, ["other"], None, "served_model: got 'other'"),
    ):
        with pytest.raises(InputError, match=message):
            runtime.predict(["sea"], served_models, temperatures)
    np.testing.assert_array_equal(plain.predict(["sea"], ["tiny-llm"], [0.7]).mu, plain.predict(["sea"]).mu)


def test_graph_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a", conditioning=Conditions(unknown_models=True, temperature=True))
    with pytest.raises(InputError, match=r"model\.onnx, inputs: got \['attention_mask', 'input_ids'\]"):
        open_runtime(folder)
    folder = write_artifact(tmp_path / "b", heads=("length", "rank"))
    with pytest.raises(InputError, match=r"model\.onnx, outputs: got \['mu', 'sigma'\]; .*'rank'"):
        open_runtime(folder)
    folder = write_rich_artifact(tmp_path / "c", urgency_levels=("now", "late"))
    with pytest.raises(InputError, match=r"outputs, urgency: got .*\['batch', 3\].*float\) \['batch', 2\]"):
        open_runtime(folder)


def with_nodes(folder: Path, output: str, *nodes: str, **changes: Any) -> Path:
    """Changes an artifact: `nodes`, in ONNX's text format, make an output of the tensor `plain`."""
    manifest = open_artifact(folder).manifest.model_copy(update=changes)
    model = onnx.load(folder / "model.onnx")
    [maker] = [node for node in model.graph.node if list(node.output) == [output]]
    maker.output[0] = "plain"
    model.graph.node.extend(map(onnx.parser.parse_node, nodes))
    onnx.save(model, folder / "model.onnx")
    write_manifest(folder, manifest)
    return folder


def test_max_length_beyond_the_position_embeddings_is_refused(tmp_path: Path) -> None:
    nodes = (
        "axis = Constant <value = int64[1] {1}> ()",
        "size = Constant <value = int64[1] {40}> ()",
        "position_table = ConstantOfShape <value = float[1] {0}> (size)",
        "positions = CumSum <exclusive = 1> (attention_mask, axis)",
        "zeros = Gather (position_table, positions)",
        "zero = ReduceSum <keepdims = 0> (zeros, axis)",
        "mu = Add (plain, zero)",
    )
    paths = (write_artifact(tmp_path / name) for name in ("40", "41"))
    short, long = (open_runtime(with_nodes(path, "mu", *nodes, max_length=int(path.name))) for path in paths)
    short.warm_up()
    open_runtime(write_artifact(tmp_path / "shortest", max_length=3)).warm_up()
    with pytest.raises(TailcastError, match=r"ONNX session failed on shape \(1, 41\)"):
        long.warm_up()


def test_token_ids_beyond_the_token_embeddings_are_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    manifest = open_artifact(folder).manifest
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["one-more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_manifest(folder, manifest)
    runtime = open_runtime(folder)
    assert runtime.tokenizer.vocabulary_size == len(VOCAB) + 1
    with pytest.raises(TailcastError, match="ONNX session failed"):
        runtime.warm_up()


# A service was ready and then answered 500.
@pytest.mark.mend
@pytest.mark.parametrize("broken", ["urgency", "bucket", "regression_tokens", "rank", "nu", "sigma"])
def test_every_head_and_served_model_is_verified(tmp_path: Path, broken: str) -> None:
    """The head's numbers are right but for the second of two served models."""
    is_vector = broken in ("urgency", "bucket")
    folder = with_nodes(
        write_rich_artifact(tmp_path / "a"),
        broken,
        "second_model = Constant <value = int64 {2}> ()",
        f"bad = Constant <value = float {{{2.0 if is_vector else 'nan'}}}> ()",
        "is_second = Equal (served_model, second_model)",
        f"condition = {'Unsqueeze (is_second, one)' if is_vector else 'Identity (is_second)'}",
        f"{broken} = Where (condition, bad, plain)",
    )
    with pytest.raises(TailcastError, match=rf"the model returned .*{broken} = "):
        open_runtime(folder).warm_up()


def test_padding_that_is_no_token_is_refused(tmp_path: Path) -> None:
    open_runtime(write_artifact(tmp_path / "a", pad_token_id=len(VOCAB) - 1))
    folder = write_artifact(tmp_path / "b", pad_token_id=len(VOCAB))
    with pytest.raises(InputError, match=rf"pad_token_id: got {len(VOCAB)}; allowed: 0 to {len(VOCAB) - 1}"):
        open_runtime(folder)


def test_provider_is_the_one_obtained_or_refused(artifact_folder: Path) -> None:
    import onnxruntime as ort

    assert open_runtime(artifact_folder, provider="cpu").provider == CPU
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(InputError, match="provider: got 'cuda'"):
            open_runtime(artifact_folder, provider="cuda")


def test_failures_are_one_clear_error(artifact_folder: Path) -> None:
    runtime = open_runtime(artifact_folder)
    with pytest.raises(TailcastError, match=r"ONNX session failed on shape \(1, 3\)"):
        runtime.predict(["crash"])
    with pytest.raises(InputError, match="seq: got 4; allowed: at least the 5 tokens"):
        runtime.run([np.ones(5, dtype=np.int64), np.ones(2, dtype=np.int64)], seq=4)
    with pytest.raises(InputError, match="threads_per_run"):
        open_runtime(artifact_folder, threads_per_run=0)
    with pytest.raises(InputError, match="batch_size"):
        runtime.predict(["sea"], batch_size=0)
