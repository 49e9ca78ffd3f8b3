"""What holds for every policy, or for all that promise it; the table that describes them; urgency."""

import math
import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import scheduler_core.policies as package
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES, make_policy, policy_class, policy_name, policy_parameters
from scheduler_core.prediction.predictions import HEADS, UrgencyPrediction
from scheduler_core.prediction.urgency import LEVELS, abstains, effective_level, expected_cost_levels
from scheduler_core.request import RequestState
from tests.scheduler_core.helpers import full_prediction, request, run_step, scheduler

FOLDER = Path(package.__file__).parent
SURE = (1.0, 0.0, 0.0, 0.0, 0.0)
#: Most probable level 2, level of least expected cost 1; most probable level 0, but nearly uniform.
LIKELY_2, FLAT = (0.1, 0.2, 0.5, 0.1, 0.1), (0.234, 0.2, 0.2, 0.183, 0.183)


@pytest.mark.parametrize("name", POLICIES)
def test_keys_are_finite_before_and_after_every_prediction(name: str) -> None:
    core = scheduler(name, max_num_seqs=1)
    policy, names = core.policy, ("a", "b", "c")
    for request_id in names:
        core.add(request(request_id, prompt=5, cap=60, ttlt_slo_s=9.0), 0.0)
    for step in range(12):
        run_step(core, float(step))
        for request_id in names:
            if step == 4:
                core.update(request_id, full_prediction(20.0), float(step))
            assert math.isfinite(policy.key(core.state(request_id), float(step)))
            assert policy.eviction_key(core.state(request_id), float(step)) < math.inf
    assert policy.inputs <= {*HEADS, "priority", "tier", "tenant", "slo", "session", "cached", "costs"}


def table() -> dict[str, list[str]]:
    """Cells of the first table of the README by policy."""
    rows = {}
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0].strip("`")] = cells
    return rows


def test_the_table_says_what_the_policies_say() -> None:
    rows = table()
    assert list(rows) == list(POLICIES)
    for name, kind in POLICIES.items():
        _, source, inputs, preemptive, changes, cost = rows[name]
        assert source
        assert inputs == (", ".join(sorted(kind.inputs)) or "-")
        assert (preemptive, changes) == ("yes" if kind.preemptive else "no", kind.key_changes)
        assert ("O(n)" in cost) == (kind.key_changes == "with_time")
        assert ("O(B)" in cost) == kind.preemptive


def test_readme_policy_runs_by_path_and_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    (tmp_path / "policy_of_the_readme.py").write_text(snippet, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = "policy_of_the_readme:ShortPromptsFirst"
    core = scheduler(name, max_num_seqs=1)
    for arrival_s, (prompt, item) in enumerate({30: "long", 5: "short"}.items()):
        core.add(request(item, float(arrival_s), prompt=prompt, cap=1), 1.0)
    assert [run_step(core, now)[0].request_id for now in (1.0, 2.0)] == ["short", "long"]
    policy = make_policy(name, {"weight": 2.0})
    assert (policy_name(policy), policy_parameters(policy)) == (name, {"weight": 2.0})
    points = {"tailcast.policies": [metadata.EntryPoint("short_prompts", name, "tailcast.policies")]}
    monkeypatch.setattr(metadata, "entry_points", lambda group: points.get(group, []))
    assert policy_class("short_prompts") is type(policy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "package.module:Class"), ("no_such_module:Policy", "No module named"),
        ("scheduler_core.policies:Nothing", "has no attribute"),
        ("scheduler_core.request:Request", "a dataclass derived from scheduler_core.policies.Policy"),
        (":", "can be imported"), ("..:x", "can be imported"),
    ],
)  # fmt: skip
def test_a_name_of_no_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make_policy(name)


K = len(LEVELS)
weights = st.lists(st.floats(0.0, 1.0), min_size=K, max_size=K).filter(lambda row: sum(row) > 1e-3)
probability_rows = weights.map(lambda row: np.array(row) / sum(row))
costs = st.floats(0.1, 20.0)
tiers = st.integers(0, K - 1)


def expected_costs(row: NDArray[np.float64], cost: float) -> list[float]:
    levels = list(enumerate(row.tolist()))
    return [sum(p * (cost * max(d - e, 0) + max(e - d, 0)) for e, p in levels) for d in range(K)]


@given(row=probability_rows, cost=costs)
def test_the_decided_level_has_the_least_expected_cost(row: NDArray[np.float64], cost: float) -> None:
    found = expected_costs(row, cost)
    assert found[int(expected_cost_levels(row, cost))] <= min(found) + 1e-6


@given(row=probability_rows, tier=tiers, promotion=st.integers(0, K - 1), threshold=st.floats(0, 1))
def test_no_text_leaves_its_declared_tier_by_more_than_the_limit(
    row: NDArray[np.float64], tier: int, promotion: int, threshold: float
) -> None:
    assert max(0, tier - promotion) <= int(effective_level(row, tier, threshold, promotion)) <= tier


@given(row=probability_rows, tier=tiers, cost=costs, level=st.integers(1, K - 1), share=st.floats(0.0, 1.0))
def test_probability_moved_to_a_more_urgent_level_never_lowers_the_urgency(
    row: NDArray[np.float64], tier: int, cost: float, level: int, share: float
) -> None:
    more = row.copy()
    moved = more[level] * share
    more[level] -= moved
    more[level - 1] += moved
    assume(not abstains(more, 0.0))  # a nearly uniform row says nothing: the declared tier
    before = effective_level(row, tier, 0.0, K - 1, under_triage_cost=cost)
    assert int(effective_level(more, tier, 0.0, K - 1, under_triage_cost=cost)) <= int(before)


@pytest.mark.parametrize(
    ("tier", "seen", "threshold", "max_promotion", "expected"),
    [
        (3, None, None, 1, 3),
        (3, (0.4, 0.3, 0.1, 0.1, 0.1), 0.5, 1, 3),  # abstains
        (3, (0.4, 0.3, 0.1, 0.1, 0.1), 0.4, 1, 2),
        (3, (0.4, 0.3, 0.1, 0.1, 0.1), None, 1, 2),
        (3, FLAT, None, 1, 3),  # says nothing: abstains without a threshold, too
        (3, FLAT, None, math.inf, 3),
        (3, FLAT, 0.0, 1, 3),
        (3, FLAT, 0.0, math.inf, 3),
        (3, SURE, 1.0, 1, 3),  # always abstains
        (3, SURE, None, 2, 1),
        (1, SURE[::-1], None, 1, 1),  # no text lowers its own request
        (3, SURE, 1.0, 5, 3),
        (3, SURE, None, 5, 0),  # unlimited trust: the declared tier does not limit it
        (1, SURE[::-1], None, math.inf, 4),
        (6, SURE, None, math.inf, 0),
        (3, LIKELY_2, None, 2, 1),  # least expected cost
        (3, LIKELY_2, None, 5, 2),  # unlimited trust: the paper's level, the most probable one
        # 5, 6: not predicted
        *((tier, SURE, None, 1, level) for tier, level in enumerate((0, 0, 1, 2, 3, 5, 6))),
    ],
)
def test_the_level_to_schedule_at(
    tier: int, seen: tuple[float, ...] | None, threshold: float | None, max_promotion: float, expected: int
) -> None:
    urgency = None if seen is None else UrgencyPrediction(seen, threshold)
    state = RequestState(request("r", tier=tier), order=0, urgency=urgency)
    assert state.effective_level(max_promotion) == expected


@pytest.mark.mend
def test_unlimited_trust_is_the_papers_level() -> None:
    """It was the level of least expected cost, 1 here, and outputs that say nothing were trusted."""
    states = [
        RequestState(request(name, tier=4), order=0, urgency=UrgencyPrediction(row))
        for name, row in (("a", LIKELY_2), ("b", FLAT))
    ]
    assert [make_policy("hpjf", {"max_promotion": K}).key(state, 0.0) for state in states] == [2.0, 4.0]
    assert int(expected_cost_levels(LIKELY_2)) == 1


@pytest.mark.mend
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2, 0.7])
def test_a_nearly_uniform_output_is_an_abstention_whatever_the_threshold(threshold: float | None) -> None:
    """A threshold below that of a nearly uniform output let it raise requests towards level 0."""
    urgency = UrgencyPrediction(FLAT, threshold)
    assert urgency.abstains
    assert [urgency.effective_level(tier, promotion) for tier in range(K) for promotion in (1, K)] == [
        tier for tier in range(K) for _ in range(2)
    ]
    assert not UrgencyPrediction(LIKELY_2, None).abstains


@given(
    row=probability_rows, tier=tiers, threshold=st.none() | st.floats(0, 1), promotion=st.integers(0, K + 1)
)
def test_a_prediction_and_an_array_of_them_have_the_same_level(
    row: NDArray[np.float64], tier: int, threshold: float | None, promotion: int
) -> None:
    urgency = UrgencyPrediction(tuple(row.tolist()), threshold)
    assert urgency.effective_level(tier, promotion) == int(effective_level(row, tier, threshold, promotion))
    assert urgency.abstains == bool(abstains(row, threshold))
