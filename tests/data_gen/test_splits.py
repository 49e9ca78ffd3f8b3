from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.splits import family_of, split_of, turn_id
from scheduler_core.errors import InputError


def test_split_is_stable_and_has_the_asked_shares() -> None:
    ids = [f"prompt-{i}" for i in range(6000)]
    splits = [split_of(prompt_id, seed=1) for prompt_id in ids]
    assert splits == [split_of(prompt_id, seed=1) for prompt_id in ids]
    shares = [splits.count(name) / len(ids) for name in ("train", "validation", "test")]
    # Standard error of a share of 0.6 over 6,000 is 0.006.
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.025)
    assert splits != [split_of(prompt_id, seed=2) for prompt_id in ids]
    # Worked out by hand from SHA-256: a changed hash would silently move test prompts into training.
    golden = {"a": "train", "b": "validation", "c": "train", "m": split_by_hand("m"), "z": split_by_hand("z")}
    assert {name: split_of(name, seed=0) for name in golden} == golden


def split_by_hand(prompt_id: str) -> str:
    first_byte = hashlib.sha256(b"0\x00" + prompt_id.encode()).digest()[0]
    assert first_byte not in (153, 204)  # the bytes in which the borders 0.6 and 0.8 fall
    return "train" if first_byte < 153 else "validation" if first_byte < 204 else "test"


@settings(deadline=None)
@given(st.text(), st.integers(0, 2**31), st.integers(1, 500))
def test_samples_of_a_prompt_and_turns_of_a_conversation_share_a_split(
    name: str, seed: int, turn: int
) -> None:
    # The split knows the prompt id and nothing of the sample, so that two samples of one prompt cannot part.
    assert len({split_of(name, seed) for _sample_index in range(3)}) == 1
    assert family_of(turn_id(name, turn)) == family_of(turn_id(name, turn + 1, "0af3"))
    assert split_of(turn_id(name, turn), seed) == split_of(turn_id(name, turn + 1, "ff"), seed)


def test_near_identical_ids_are_independent() -> None:
    pairs = [(f"p{i}", f"p{i} ") for i in range(3000)]
    same = sum(split_of(a, 0) == split_of(b, 0) for a, b in pairs) / len(pairs)
    # Independent splits agree with probability 0.6^2 + 2 * 0.2^2 = 0.44, standard error 0.009.
    assert same == pytest.approx(0.44, abs=0.04)
    assert family_of("a#turn-x") == "a#turn-x"
    assert family_of("a#turn-1 ") == "a#turn-1 "


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.5), (1.2, -0.1, -0.1)])
def test_bad_fractions_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="sum to 1"):
        split_of("x", 0, fractions)
