"""The list of policies, and the table that describes it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import scheduler_core.policies as package
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES, make_policy, policy_class, policy_name, policy_parameters
from tests.scheduler_core.helpers import request, run_step, scheduler

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


def test_the_policy_of_the_readme_runs_by_its_path_and_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert policy_name(policy) == name
    assert policy_parameters(policy) == {"weight": 2.0}
    point = metadata.EntryPoint("short_prompts", name, "tailcast.policies")
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == "tailcast.policies" else []
    )
    assert policy_class("short_prompts") is type(policy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "package.module:Class"),
        ("no_such_module:Policy", "No module named"),
        ("scheduler_core.policies:Nothing", "has no attribute"),
        ("scheduler_core.request:Request", "a dataclass derived from scheduler_core.policies.Policy"),
        (":", "can be imported"),
        ("..:x", "can be imported"),
    ],
)
def test_a_name_of_no_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make_policy(name)
