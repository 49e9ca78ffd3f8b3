"""Cache or recompute: the paper's numbers, its errata, and the exact rule against trying all possibilities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.kv_cost import KVCost

#: A100, Qwen1.5-7B, from the paper's code.
A100_7B = KVCost(
    alpha_1=5.13462572e-07, alpha_2=1.48057167e-04, gamma_1=1.34911080e-08, gamma_2=1.330198e-02, beta=1e-4
)


def test_decoding_costs_the_sum_over_the_tokens() -> None:
    """Eq. 4: the sum of gamma_1 i + gamma_2 for i = n + 1 .. n + m; n = 3, m = 2: gamma_1 (4 + 5) + 2 gamma_2."""
    cost = KVCost(gamma_1=2.0, gamma_2=7.0)
    assert cost.decode_s(3, 2) == 2.0 * 9 + 2 * 7.0


def test_the_rules_differ_where_the_paper_has_its_inequality_reversed() -> None:
    """A100, 7B, n = 1000 prompt tokens, nothing decoded: loading takes 0.1 s, prefill 0.5135 + 0.1481 = 0.6615 s.

    Loading is faster, so the exact rule keeps all 1000; inequality 3 as printed says the opposite.
    """
    assert A100_7B.prefill_s(1000) == pytest.approx(0.66152, abs=1e-5)
    assert A100_7B.return_s(1000, 1000) == pytest.approx(0.1)
    assert A100_7B.return_s(1000, 0) == A100_7B.prefill_s(1000)
    assert A100_7B.offload_tokens(1000, 0) == 1000
    assert A100_7B.offload_tokens(1000, 0, "paper") == 0


def test_the_printed_optimum_worked_out() -> None:
    """beta = 10, gamma_1 = 0.5, gamma_2 = 1, n = 4: (10 - 2 - (0.5 + 2) / 2) / (2 * 0.5) = 6.75 decoded tokens.

    Prefill of 4 tokens takes 4 * 0.1 = 0.4 s and loading 40 s; as printed the prompt is kept, and 6 of 9 tokens.
    """
    cost = KVCost(alpha_1=0.0, alpha_2=0.1, gamma_1=0.5, gamma_2=1.0, beta=10.0)
    assert cost.offload_tokens(4, 9, "paper") == 4 + 6
    assert cost.offload_tokens(4, 3, "paper") == 4 + 3, "no more than there are"
    assert cost.offload_tokens(4, 9, "exact") == 0


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0, 1e-2), st.floats(0, 1e-1), st.floats(0, 1e-1))
def test_the_exact_rule_is_the_best_of_all(
    prompt: int, decoded: int, a1: float, a2: float, beta: float
) -> None:
    cost = KVCost(alpha_1=a1, alpha_2=a2, beta=beta)
    total = prompt + decoded
    chosen = cost.return_s(total, cost.offload_tokens(prompt, decoded))
    best = min(cost.return_s(total, kept) for kept in range(total + 1))
    assert chosen <= best + 1e-9
