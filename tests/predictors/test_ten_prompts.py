"""The first ten prompts that somebody tries: the shipped predictors hear how much is asked for."""

from functools import cache

import pytest

import tailcast

SUPPORT = "You are the support assistant of a bookstore. Answer in one sentence."
DELAYED = "My order is two weeks late and nobody answers my mails. What can I do?"
#: Request -> prompt or messages, and the range of its predicted median in tokens.
REQUESTS = {
    "5 facts": ("Tell me 5 facts about the Moon.", (50, 400)),
    "50 facts": ("Tell me 50 facts about the Moon.", (350, 3000)),
    "100 words": ("Write 100 words about the history of tea.", (80, 300)),
    "1,000 words": ("Write 1,000 words about the history of tea.", (500, 2500)),
    "10 words": ("Explain photosynthesis in 10 words.", (8, 60)),
    "5,000 words": ("Explain photosynthesis in 5,000 words.", (800, 8000)),
    "yes or no": ("Is a tomato a fruit? Answer only yes or no.", (1, 15)),
    "yes or no, explained": ("Is a tomato a fruit? Explain your answer in detail.", (100, 1000)),
    "10,000 word story": ("Write a 10,000 word story about a lighthouse keeper.", (1200, 15000)),
    "one sentence, by the system prompt": (
        [{"role": "system", "content": SUPPORT}, {"role": "user", "content": DELAYED}],
        (10, 70),
    ),
}
#: Pairs of them, the shorter one first, and the least ratio of their medians.
ORDER = [
    ("5 facts", "50 facts", 2.0),
    ("100 words", "1,000 words", 3.0),
    ("10 words", "5,000 words", 10.0),
    ("yes or no", "yes or no, explained", 5.0),
    ("100 words", "10,000 word story", 5.0),
    ("one sentence, by the system prompt", "5 facts", 1.0),
]


@cache
def median(predictor: str, request: str) -> float:
    prompt, _ = REQUESTS[request]
    return tailcast.predict(prompt, max_tokens=32_768, predictor=predictor).median


@pytest.mark.parametrize("predictor", ["pretrained", "tiny"])
@pytest.mark.parametrize(("shorter", "longer", "ratio"), ORDER)
def test_more_is_longer(predictor: str, shorter: str, longer: str, ratio: float) -> None:
    """5 and 50 facts differed by 1.05, 100 and 1,000 words by 1.19; `tiny` has half of the ratio in ln tokens."""
    least = ratio if predictor == "pretrained" else ratio**0.5
    assert median(predictor, longer) > least * median(predictor, shorter)


@pytest.mark.parametrize("request_", REQUESTS)
def test_sizes_are_about_right(request_: str) -> None:
    """They were 106 tokens for yes or no, 448 for the story, and 294 for the chat, of which only the last text was read."""
    low, high = REQUESTS[request_][1]
    assert low <= median("pretrained", request_) <= high


@pytest.mark.parametrize("predictor", ["pretrained", "tiny"])
def test_the_system_prompt_is_read(predictor: str) -> None:
    unlimited = tailcast.predict(DELAYED, predictor=predictor).median
    assert median(predictor, "one sentence, by the system prompt") < 0.6 * unlimited
