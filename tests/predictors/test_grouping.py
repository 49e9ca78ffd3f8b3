from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.service.grouping import BatchingSettings, nearest_in_length, oldest_first
from scheduler_core.errors import InputError

LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=60)
SETTINGS = st.builds(
    BatchingSettings,
    max_batch=st.integers(1, 40),
    max_wait_s=st.just(0.0),
    max_padding=st.one_of(st.floats(1, 4), st.just(math.inf)),
    max_padded_tokens=st.integers(1, 20_000),
)


def settings(**changes: Any) -> BatchingSettings:
    return BatchingSettings(**({"max_batch": 4, "max_wait_s": 0.0} | changes))


@given(lengths=LENGTHS, settings=SETTINGS, data=st.data())
def test_group_holds_the_start_and_keeps_every_limit(
    lengths: list[int], settings: BatchingSettings, data: st.DataObject
) -> None:
    lengths.sort()
    start = data.draw(st.integers(0, len(lengths) - 1))
    group = nearest_in_length(lengths, start, settings)
    assert start in group
    assert 0 <= group.start < group.stop <= len(lengths)
    assert len(group) <= settings.max_batch
    chosen = [lengths[position] for position in group]
    if len(chosen) > 1:
        assert len(chosen) * max(chosen) <= settings.max_padding * sum(chosen)
        assert len(chosen) * max(chosen) <= settings.max_padded_tokens


@given(lengths=LENGTHS, settings=SETTINGS, data=st.data())
def test_group_cannot_be_grown_by_either_neighbour(
    lengths: list[int], settings: BatchingSettings, data: st.DataObject
) -> None:
    lengths.sort()
    group = nearest_in_length(lengths, data.draw(st.integers(0, len(lengths) - 1)), settings)
    if len(group) == settings.max_batch:
        return
    for low, high in ((group.start - 1, group.stop), (group.start, group.stop + 1)):
        if low >= 0 and high <= len(lengths):
            grown = lengths[low:high]
            padded = len(grown) * max(grown)
            assert padded > settings.max_padding * sum(grown) or padded > settings.max_padded_tokens


def test_nearer_neighbours_come_first() -> None:
    lengths = [5, 9, 10, 12, 40]
    assert [lengths[at] for at in nearest_in_length(lengths, 2, settings(max_batch=3))] == [9, 10, 12]
    assert [lengths[at] for at in nearest_in_length(lengths, 4, settings(max_batch=2))] == [12, 40]


def test_padding_limit_leaves_an_outlier_alone() -> None:
    assert list(nearest_in_length([5, 9, 10, 12, 400], 4, settings(max_padding=1.1))) == [4]


@given(lengths=LENGTHS, settings=SETTINGS)
def test_oldest_first_takes_a_prefix_within_the_limits(
    lengths: list[int], settings: BatchingSettings
) -> None:
    count = oldest_first(lengths, settings)
    assert 1 <= count <= min(len(lengths), settings.max_batch)
    assert count == 1 or count * max(lengths[:count]) <= settings.max_padded_tokens
    if count < min(len(lengths), settings.max_batch):
        assert (count + 1) * max(lengths[: count + 1]) > settings.max_padded_tokens


def test_defaults_of_the_two_kinds_of_device() -> None:
    cpu, gpu = BatchingSettings.cpu(num_workers=2), BatchingSettings.gpu()
    assert (cpu.max_batch, cpu.max_wait_s, cpu.num_workers, cpu.order) == (4, 0.0, 2, "length")
    assert (gpu.max_batch, gpu.max_wait_s) == (32, 0.003)
    assert (cpu.max_running, gpu.max_running) == (3, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 0),
        ("max_wait_s", -1.0),
        ("max_wait_s", math.nan),
        ("max_padding", 0.9),
        ("max_padding", math.nan),
        ("max_padded_tokens", 0),
        ("max_queue", 0),
        ("num_workers", 0),
        ("num_ahead", -1),
        ("order", "random"),
    ],
)
def test_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        settings(**{field: value})
