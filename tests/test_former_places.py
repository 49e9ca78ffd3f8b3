"""What every batch former needs of an engine; docs/extending.md has the result.

`python -m tests.test_former_places` writes the table. Plans in vLLM are compared with the simulator's in
scheduler_core/adapters/test_live_batches.py, and executed by vLLM's real scheduler in test_vllm_formers.py there.
"""

import re
import sys
from pathlib import Path

from scheduler_core.batching import BATCH_FORMERS, make_former
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.request import Request
from tests.scheduler_core.adapters.test_live_batches import PARAMETERS

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCK = re.compile(r"(?<=<!-- formers and places -->\n).*(?=<!-- end of formers and places -->)", re.DOTALL)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=128, num_kv_blocks=100)
LONG = Request(
    request_id="long", arrival_s=0.0, prompt_tokens=LIMITS.max_num_batched_tokens + 1, max_tokens=1
)


def row(name: str) -> tuple[str, str, str, str]:
    """A row of the table, by what the former says of a preemptive policy, a long prompt and its memory."""
    former = make_former(name, PARAMETERS.get(name, {}))
    try:
        former.check_policy(make_policy("trail"))
        preemptive = "yes"
    except InputError:
        preemptive = "no"
    num = former.max_running(LIMITS)
    limits = {LIMITS.max_num_seqs: "`max_num_seqs`", LIMITS.num_kv_blocks: "what fits"}
    prompts = "split" if former.refusal(LONG, LIMITS) is None else "refused"
    return f"`{name}`", preemptive, prompts, limits.get(num, "`n`, and what fits")


def table() -> str:
    rows = [("former", "preemptive policies", "long prompts", "in memory"), *map(row, sorted(BATCH_FORMERS))]
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows]
    return "".join([lines[0], "|---|---|---|---|\n", *lines[1:]])


def test_the_page_has_the_table() -> None:
    found = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "run python -m tests.test_former_places"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
