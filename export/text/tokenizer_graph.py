"""A WordPiece tokenizer as an ONNX graph: text in, padded token ids and mask out, equal to the `tokenizers` package.

onnxruntime-extensions has operators that tokenise as BERT does, but they differ: on accents, Hangul, control
characters, added tokens in the text. So only its primitive ones are used, and what happens to a character is a table
asked of the tokenizer itself (`character_map`):

    join all texts, each with a marker before it -> drop and set apart ranges of characters -> split into characters,
    keep what a tokenizer of bounded work would read, map each -> join, split at spaces -> WordPiece -> ids -> rows,
    told by the markers -> truncate, add special tokens, pad

Control characters serve as markers; those in the text are dropped first, as the tokenizer does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from export.text.character_map import CharacterMap, character_map
from predictors.artifact import Artifact
from predictors.tokenizer import LAST_CUT_CHARS_PER_TOKEN
from scheduler_core.errors import InputError

EXTENSIONS = "ai.onnx.contrib"
OPSET = 20
IR_VERSION = 9
TEXT = "text"

_ROW, _NOTHING = "\x01", "\x02"
# One for each added token; tab, newline and return have a meaning of their own.
_STAND_INS = "".join(chr(code) for code in (*range(0x03, 0x09), *range(0x0E, 0x20)))


@dataclass(frozen=True, slots=True)
class WordPiece:
    """What the graph needs of a tokenizer.

    Attributes:
        vocabulary: Token -> id, added tokens left out.
        added: Added token -> id, found in the text before anything else.
        prefix, suffix: Token ids put around each text.
        unknown: The token of unknown words.
        continuing: Prefix of a token inside a word.
        max_chars: A longer word is unknown.
        characters: What happens to each character.
    """

    vocabulary: dict[str, int]
    added: dict[str, int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    unknown: str
    continuing: str
    max_chars: int
    characters: CharacterMap


def read_wordpiece(path: Path) -> WordPiece:
    """A tokenizer.json with a WordPiece model.

    Raises:
        InputError: It is of another kind, or has something that the graph cannot do the same way.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    if model.get("type") != "WordPiece":
        allowed = "WordPiece: other tokenizers cannot go into the graph; keep tokenizer.json beside it"
        raise InputError("tokenizer.json, model", model.get("type"), allowed)
    added = content.get("added_tokens", [])
    for token in added:
        flags = [name for name in ("lstrip", "rstrip", "single_word", "normalized") if token.get(name)]
        if flags:
            raise InputError(f"tokenizer.json, added token {token['content']}", flags, "none of these flags")
    if len(added) > len(_STAND_INS):
        raise InputError("tokenizer.json, added_tokens", len(added), f"at most {len(_STAND_INS)}")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    characters = character_map(tokenizer)
    for control in (_ROW, _NOTHING, *_STAND_INS):
        if characters.apply(control):
            raise InputError("tokenizer.json", control, "normalisation that drops control characters")
    prefix, suffix = _special_tokens(tokenizer)
    return WordPiece(
        vocabulary=dict(model["vocab"]),
        added={token["content"]: token["id"] for token in added},
        prefix=prefix,
        suffix=suffix,
        unknown=model["unk_token"],
        continuing=model["continuing_subword_prefix"],
        max_chars=model["max_input_chars_per_word"],
        characters=characters,
    )


def _special_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    mask = tokenizer.encode("a").special_tokens_mask
    ids = tokenizer.encode("a").ids
    start, end = mask.index(0), len(mask) - mask[::-1].index(0)
    return tuple(ids[:start]), tuple(ids[end:])


def tokenizer_graph(artifact: Artifact, *, seq_multiple: int = 1) -> onnx.ModelProto:
    """The graph of an artifact's tokenizer: text [batch] in, input_ids and attention_mask [batch, seq] out.

    Args:
        artifact: An encoder with a WordPiece tokenizer.
        seq_multiple: Columns are rounded up to a multiple of it (at most max_length), so that a server finds more
            requests of the same shape to batch.

    Raises:
        InputError: The tokenizer cannot be done in a graph.
    """
    manifest = artifact.manifest
    if manifest.max_length is None or manifest.truncation_side is None:
        raise InputError("artifact manifest, kind", manifest.kind, "encoder, which reads token ids")
    if seq_multiple < 1:
        raise InputError("seq_multiple", seq_multiple, "an integer >= 1")
    builder = _Builder(read_wordpiece(artifact.tokenizer_path))
    assert manifest.pad_token_id is not None
    return builder.build(
        manifest.max_length, manifest.truncation_side, manifest.pad_token_id, seq_multiple=seq_multiple
    )


class _Builder:
    """Collects nodes; each method adds some and gives the name of what they make."""

    def __init__(self, wordpiece: WordPiece) -> None:
        self._wordpiece = wordpiece
        # The marker's id: the first that no token has.
        self._row_id = 1 + max(*wordpiece.vocabulary.values(), *wordpiece.added.values())
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def build(self, max_length: int, side: str, pad: int, *, seq_multiple: int) -> onnx.ModelProto:
        # Where the middle is dropped, so many characters of each end.
        tokens = max_length - max_length // 2 if side == "middle" else max_length
        characters = self._characters(LAST_CUT_CHARS_PER_TOKEN * tokens, side)
        ids = self._ids(characters)
        self._rows(ids, max_length, side, pad, seq_multiple)
        inputs = [helper.make_tensor_value_info(TEXT, TensorProto.STRING, ["batch"])]
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"])
            for name in ("input_ids", "attention_mask")
        ]
        graph = helper.make_graph(
            self._nodes, "tokenizer", inputs, outputs, initializer=list(self._constants.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(EXTENSIONS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="tailcast")

    def _characters(self, limit: int, side: str) -> str:
        """All texts as one list of characters, the marker before each text and none but it."""
        table = self._wordpiece.characters
        pieces = self._node("StringSplit", TEXT, count=2, delimiter="\0")[0]
        whole = self._extension("StringJoin", pieces, self._strings([""]), self._numbers([1]))
        controls = self._replaced(whole, rf"[{_ROW}-\x08\x0b\x0c\x0e-\x1f]", "")
        marked = self._node("StringConcat", self._strings([_ROW]), controls)[0]
        text = self._extension("StringJoin", marked, self._strings([""]), self._numbers([0]))
        added = self._wordpiece.added
        for stand_in, token in zip(_STAND_INS, sorted(added, key=len, reverse=True), strict=False):
            text = self._replaced(text, re.escape(token), stand_in)
        # Cut before anything is dropped, as the tokenizer that is served counts characters.
        listed = self._cut(self._split(text), limit, side)
        text = self._extension("StringJoin", listed, self._strings([""]), self._numbers([0]))
        if table.dropped:
            text = self._replaced(text, f"[{_ranges(table.dropped)}]+", "")
        if table.apart:
            text = self._replaced(text, f"([{_ranges(table.apart)}])", r" \1 ")
        return self._split(text)

    def _split(self, text: str) -> str:
        every = self._strings(["((?s).)"])
        return self._extension("StringRegexSplitWithOffsets", text, every, every, count=4)

    def _cut(self, characters: str, limit: int, side: str) -> str:
        """At most `limit` characters of each text, cut at the last gap if that leaves more than half of them.

        Where the middle is dropped, so many of each end, of texts that have more than both.
        """
        marker = self._cast(self._node("Equal", characters, self._strings([_ROW]))[0])
        row = self._sub(self._cumsum(marker), self._numbers([1]))
        starts = self._where_true(marker)
        total = self._node("Shape", characters)[0]
        ends = self._node("Concat", self._after(starts, 1), total, axis=0)[0]
        index = self._node("Range", self._scalar(0), self._scalar_of(total), self._scalar(1))[0]
        length = self._sub(self._sub(ends, starts), self._numbers([1]))
        place = self._sub(self._sub(index, self._gather(starts, row)), self._numbers([1]))
        from_end = self._sub(self._sub(self._gather(length, row), self._numbers([1])), place)
        gap = self._node(
            "Or",
            self._node("Equal", characters, self._strings([" "]))[0],
            self._node("Equal", characters, self._strings(["\n"]))[0],
        )[0]
        most = 2 * limit if side == "middle" else limit
        longer = self._node("Greater", length, self._numbers([most]))[0]
        nothing = self._node("Expand", self._numbers([-1]), self._node("Shape", starts)[0])[0]
        kept = self._node("Cast", marker, to=TensorProto.BOOL)[0]
        for distance in {"right": (place,), "left": (from_end,), "middle": (place, from_end)}[side]:
            near = self._node("Less", distance, self._numbers([limit]))[0]
            is_gap = self._node("And", gap, near)[0]
            candidate = self._node("Where", is_gap, distance, self._numbers([-1]))[0]
            last_gap = self._node("ScatterElements", nothing, row, candidate, axis=0, reduction="max")[0]
            useful = self._node("Greater", last_gap, self._numbers([limit // 2]))[0]
            bound = self._node("Where", useful, last_gap, self._numbers([limit]))[0]
            bound = self._node("Where", longer, bound, self._numbers([2**62]))[0]
            own = self._node("Less", distance, self._gather(bound, row))[0]
            kept = self._node("Or", kept, own)[0]
        return self._node("Compress", characters, kept, axis=0)[0]

    def _ids(self, characters: str) -> str:
        """Token ids of all texts in a row, the marker's id before each text."""
        wordpiece = self._wordpiece
        stand_ins = dict(zip(_STAND_INS, sorted(wordpiece.added, key=len, reverse=True), strict=False))
        changes = dict(wordpiece.characters.changed)
        changes |= {stand_in: f" {stand_in} " for stand_in in (_ROW, *stand_ins)}
        lines = [
            f"{key}\t{value or _NOTHING}"
            for key, value in changes.items()
            if key not in "\t\n\r" and (value or key not in (_NOTHING, *_STAND_INS))
        ]
        mapped = self._extension("StringMapping", characters, map="\n".join(lines))
        text = self._extension("StringJoin", mapped, self._strings([""]), self._numbers([0]))
        text = self._replaced(text, f"{_NOTHING}+", "")
        text = self._replaced(text, "[\t\n\r]", " ")
        words = self._extension(
            "StringSplit", text, self._strings([" "]), self._constant(np.array([True])), count=3, take=1
        )
        # Each word a row of its own, so that the operator tells where its tokens start.
        total = self._node("Add", self._scalar_of(self._node("Shape", words)[0]), self._scalar(1))[0]
        rows = self._node("Range", self._scalar(0), total, self._scalar(1))[0]
        markers = {_ROW: self._row_id} | {key: wordpiece.added[token] for key, token in stand_ins.items()}
        vocabulary = wordpiece.vocabulary | markers
        tokens, offsets, *_ = self._node(
            "WordpieceTokenizer",
            words,
            rows,
            count=4,
            domain=EXTENSIONS,
            vocab=json.dumps(vocabulary, ensure_ascii=False),
            suffix_indicator=wordpiece.continuing,
            unknown_token=wordpiece.unknown,
            max_input_chars_per_word=wordpiece.max_chars,
        )
        table = "\n".join(f"{token}\t{number}" for token, number in vocabulary.items())
        unknown = vocabulary[wordpiece.unknown]
        ids = self._extension("StringToVector", tokens, map=table, unk=str(unknown))
        return self._whole_words(self._node("Reshape", ids, self._numbers([-1]))[0], offsets, unknown)

    def _whole_words(self, ids: str, offsets: str, unknown: int) -> str:
        """One unknown token for each word that has one: the operator also gives the pieces that it knew."""
        starts = self._node("Slice", offsets, self._numbers([0]), self._numbers([-1]))[0]
        zeros = self._node("Expand", self._numbers([0]), self._node("Shape", ids)[0])[0]
        ones = self._node("Expand", self._numbers([1]), self._node("Shape", starts)[0])[0]
        first = self._node("ScatterElements", zeros, starts, ones, axis=0)[0]
        word = self._sub(self._cumsum(first), self._numbers([1]))
        missing = self._cast(self._node("Equal", ids, self._numbers([unknown]))[0])
        none = self._node("Expand", self._numbers([0]), self._node("Shape", starts)[0])[0]
        broken = self._node("ScatterElements", none, word, missing, axis=0, reduction="max")[0]
        is_broken = self._node("Cast", self._gather(broken, word), to=TensorProto.BOOL)[0]
        kept = self._node(
            "Or", self._node("Not", is_broken)[0], self._node("Cast", first, to=TensorProto.BOOL)[0]
        )[0]
        replaced = self._node("Where", is_broken, self._numbers([unknown]), ids)[0]
        return self._node("Compress", replaced, kept, axis=0)[0]

    def _rows(self, ids: str, max_length: int, side: str, pad: int, multiple: int) -> None:
        """Truncation, special tokens, padding: input_ids and attention_mask."""
        prefix, suffix = self._wordpiece.prefix, self._wordpiece.suffix
        special = len(prefix) + len(suffix)
        marker = self._cast(self._node("Equal", ids, self._numbers([self._row_id]))[0])
        starts = self._where_true(marker)
        ends = self._node("Concat", self._after(starts, 1), self._node("Shape", ids)[0], axis=0)[0]
        count = self._sub(self._sub(ends, starts), self._numbers([1]))
        kept = self._node("Min", count, self._numbers([max_length - special]))[0]
        dropped = self._sub(count, kept)
        first = self._node("Add", starts, self._numbers([1]))[0]
        if side == "left":
            first = self._node("Add", first, dropped)[0]
        longest = self._node("ReduceMax", kept, self._numbers([0]), keepdims=1)[0]
        seq = self._node("Add", longest, self._numbers([special]))[0]
        if multiple > 1:
            up = self._node("Add", seq, self._numbers([multiple - 1]))[0]
            steps = self._node("Div", up, self._numbers([multiple]))[0]
            seq = self._node("Mul", steps, self._numbers([multiple]))[0]
            seq = self._node("Min", seq, self._numbers([max_length]))[0]
        column = self._node("Range", self._scalar(0), self._scalar_of(seq), self._scalar(1))[0]
        column = self._node("Unsqueeze", column, self._numbers([0]))[0]
        kept, first = (self._node("Unsqueeze", name, self._numbers([1]))[0] for name in (kept, first))
        # Of column c the text's token is c - len(prefix); where that is none of its tokens, another one is put there.
        own = self._sub(column, self._numbers([len(prefix)]))
        place = self._node("Add", first, own)[0]
        if side == "middle":
            num_first = max_length - max_length // 2 - len(prefix)
            is_last = self._node("GreaterOrEqual", own, self._numbers([num_first]))[0]
            skipped = self._node("Unsqueeze", dropped, self._numbers([1]))[0]
            skipped = self._node("Where", is_last, skipped, self._numbers([0]))[0]
            place = self._node("Add", place, skipped)[0]
        last = self._sub(self._node("Shape", ids)[0], self._numbers([1]))
        safe = self._node("Max", self._node("Min", place, last)[0], self._numbers([0]))[0]
        values = self._gather(ids, safe)
        after = self._sub(column, self._node("Add", kept, self._numbers([len(prefix)]))[0])
        for number, token in enumerate(prefix):
            here = self._node("Equal", column, self._numbers([number]))[0]
            values = self._node("Where", here, self._numbers([token]), values)[0]
        for number, token in enumerate(suffix):
            here = self._node("Equal", after, self._numbers([number]))[0]
            values = self._node("Where", here, self._numbers([token]), values)[0]
        used = self._node("Less", after, self._numbers([len(suffix)]))[0]
        self._node("Where", used, values, self._numbers([pad]), names=("input_ids",))
        self._node("Cast", used, names=("attention_mask",), to=TensorProto.INT64)

    def _node(
        self,
        op: str,
        *inputs: str,
        count: int = 1,
        names: Sequence[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[str]:
        number = len(self._nodes)
        outputs = names or [f"t{number}_{each}" for each in range(count)]
        self._nodes.append(helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes))
        return outputs

    def _extension(self, op: str, *inputs: str, count: int = 1, take: int = 0, **attributes: Any) -> str:
        return self._node(op, *inputs, count=count, domain=EXTENSIONS, **attributes)[take]

    def _constant(self, value: Any) -> str:
        key = f"{value.dtype}{value.shape}{value.tolist()}"
        name = self._constants[key].name if key in self._constants else f"c{len(self._constants)}"
        self._constants[key] = numpy_helper.from_array(value, name)
        return name

    def _numbers(self, values: list[int]) -> str:
        return self._constant(np.array(values, dtype=np.int64))

    def _scalar(self, value: int) -> str:
        return self._constant(np.array(value, dtype=np.int64))

    def _strings(self, values: list[str]) -> str:
        return self._constant(np.array(values, dtype=object))

    def _replaced(self, text: str, pattern: str, by: str) -> str:
        return self._extension("StringRegexReplace", text, self._strings([pattern]), self._strings([by]))

    def _sub(self, one: str, other: str) -> str:
        return self._node("Sub", one, other)[0]

    def _gather(self, values: str, places: str) -> str:
        return self._node("Gather", values, places)[0]

    def _cast(self, value: str) -> str:
        return self._node("Cast", value, to=TensorProto.INT64)[0]

    def _cumsum(self, values: str) -> str:
        return self._node("CumSum", values, self._scalar(0))[0]

    def _scalar_of(self, value: str) -> str:
        return self._node("Squeeze", value)[0]

    def _where_true(self, values: str) -> str:
        return self._node("Squeeze", self._node("NonZero", values)[0], self._numbers([0]))[0]

    def _after(self, values: str, start: int) -> str:
        return self._node("Slice", values, self._numbers([start]), self._numbers([2**62]))[0]


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
