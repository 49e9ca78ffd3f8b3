"""The list of policies, and the table that describes it."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import scheduler_core.policies as package
from scheduler_core.policies import POLICIES, make_policy, policy_name, policy_parameters

FOLDER = Path(package.__file__).parent


def table() -> dict[str, list[str]]:
    """Cells of the first table of the README by policy."""
    rows = {}
    text = (FOLDER / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    for line in text.splitlines():
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
        assert preemptive == ("yes" if kind.preemptive else "no")
        assert changes == kind.key_changes
        assert ("O(n)" in cost) == (kind.key_changes == "with_time")
        assert ("O(B)" in cost) == kind.preemptive


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_a_documented_keyword_only_slots_dataclass(name: str) -> None:
    policy = make_policy(name)
    assert policy_name(policy) == name
    assert "key" in (type(policy).__doc__ or "")
    assert all(field.kw_only for field in dataclasses.fields(policy) if field.init)
    assert not hasattr(policy, "__dict__")
    rebuilt = make_policy(name, policy_parameters(policy))
    assert policy_parameters(rebuilt) == policy_parameters(policy)


def test_no_policy_knows_another_one() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "base"}
    assert len(modules) == len(POLICIES)
    for module in modules:
        for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scheduler_core.policies"):
                assert node.module == "scheduler_core.policies.base", module
