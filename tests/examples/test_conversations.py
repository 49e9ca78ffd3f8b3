"""Conversations of the training data of the shipped predictors."""

import re

import numpy as np
import pandas as pd
import pytest

from examples.pretrained.conversations import (
    OMITTED,
    columns,
    conversation_of,
    is_bare,
    thinking,
    with_options,
)

SYSTEM = "You are a careful analyst."


@pytest.mark.parametrize(
    ("dataset", "prompt", "messages"),
    [
        ("alpaca", "Hello", [("user", "Hello")]),
        ("mt_bench_multilingual", f"One{OMITTED}Two", [("user", "One"), ("user", "Two")]),
        ("tau_bench_airline", f"Hi{OMITTED}[tool result] {{}}", [("user", "Hi"), ("tool", "{}")]),
        ("ai_independence_bench", f"{SYSTEM}{OMITTED}Hi", [("system", SYSTEM), ("user", "Hi")]),
        ("hallucin_pm", f"System:\n{SYSTEM}\n\nUser:\nCompare.", [("system", SYSTEM), ("user", "Compare.")]),
        ("hallucin_pm", f"System: {SYSTEM} Compare.", [("user", f"System: {SYSTEM} Compare.")]),
        (
            "farel_bench",
            f"{SYSTEM}\n\nGiven the family relationships:\n* A",
            [("system", SYSTEM), ("user", "Given the family relationships:\n* A")],
        ),
    ],
)
def test_messages_of_a_public_set(dataset, prompt, messages):
    assert [
        tuple(each) for each in conversation_of(dataset, prompt, "m") if each.role != "options"
    ] == messages


def test_a_system_prompt_of_its_own_column_is_the_first_message():
    messages = conversation_of("reasoning_gym", "2 + 2?", "m", f"{SYSTEM}\n")
    assert messages == (("system", SYSTEM), ("user", "2 + 2?"))
    assert not is_bare(messages)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("deepseek/deepseek-v3.2:low", {"reasoning_effort": "low"}),
        ("o4-mini-high-long", {"reasoning_effort": "high"}),
        ("qwen3-30b-a3b-nothink", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("claude-3.7-thinking-4k", {"chat_template_kwargs": {"enable_thinking": True}}),
        ("gpt-5.4-xhigh", {"reasoning_effort": "xhigh"}),
        ("mistral-medium", {}),
        ("gpt-4o-mini", {}),
        ("yi-lightning", {}),
    ],
)
def test_thinking_by_the_name_of_a_served_model(model, options):
    assert thinking(model) == options


def test_columns_of_conversations():
    written = columns([conversation_of("alpaca", "Hi", "m"), conversation_of("tau_bench_airline", "Hi", "m")])
    assert written["prompt"] == ["Hi", "Hi"]
    assert written["messages"][0] is None
    options, user = written["messages"][1]
    assert options["role"] == "options"
    assert "book_reservation" in options["content"]
    assert user == {"role": "user", "content": "Hi"}


def test_copies_keep_the_lengths_but_for_min_tokens():
    rows = pd.DataFrame(
        {
            "prompt_id": [str(number // 2) for number in range(160)],
            "prompt": [f"prompt {number // 2}" for number in range(160)],
            "model": ["a", "b"] * 80,
            "output_tokens": [np.array([5, number + 1]) for number in range(160)],
            "finished": [np.array([True, True])] * 160,
        }
    )
    copies = with_options(rows, 60, seed=1)
    assert copies.prompt_id.nunique() == 60
    assert copies.messages.notna().all()
    originals = {(row.prompt, row.model): row.output_tokens for row in rows.itertuples()}
    seen = set()
    for row in copies.itertuples():
        texts = {message["role"]: message["content"] for message in row.messages}
        seen |= {*texts, *re.findall(r"min tokens|stop|n (?=\d)", texts.get("options", ""))}
        assert texts["user"] == row.prompt
        found = re.search(r"min tokens (\d+)", texts.get("options", ""))
        least = int(found[1]) if found else 1
        assert row.output_tokens.tolist() == np.maximum(originals[row.prompt, row.model], least).tolist()
    assert seen == {"min tokens", "n ", "stop", "system", "user", "options"}
    pd.testing.assert_frame_equal(copies, with_options(rows, 60, seed=1))
