"""The benchmarks of agents on a few sessions of their own."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.correcting import agent_sessions


def table(num_sessions: int, turns: int) -> list[dict[str, object]]:
    """Sessions whose outputs are as long as the session's level and the new input; a request without an output."""
    rng, rows = np.random.default_rng(0), []
    for number in range(num_sessions):
        level, context, now = rng.normal(5.5, 0.8), 20_000, 0.0
        for turn in range(turns):
            new = int(np.exp(rng.uniform(4, 9)))
            output = int(np.exp(level + 0.3 * np.log(new / 500) + 0.2 * rng.standard_normal())) + 1
            rows.append(
                {
                    "session": f"session_{number}",
                    "agent": "main",
                    "depth": 0,
                    "time_s": now,
                    "model": "m",
                    "input_tokens": context + new,
                    "cached_tokens": context,
                    "output_tokens": 0 if (number, turn) == (0, 3) else output,
                    "input_types": "tool_result" if turn else "text",
                    "api_time_s": 0.02 * output if turn % 2 else None,
                    "tool_tokens": 1000,
                    "system_tokens": 500,
                }
            )
            context, now = context + new + output, now + 10.0 + 0.02 * output
    return rows


def test_all_methods_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sessions.parquet"
    pq.write_table(pa.Table.from_pylist(table(12, 40)), file)
    requests = agent_sessions.read_requests(str(file), held_out=False)
    assert len(requests) == 12 * 40 - 1
    held_out = {request.session for request in agent_sessions.read_requests(str(file), held_out=True)}
    assert 0 < len(held_out) < 12
    assert not any(map(agent_sessions.is_development, held_out))
    words = [str(file), "--sessions", "all", "--seeds", "1", "--hours", "0.1"]
    page = tmp_path / "page.md"
    agent_sessions.main([*words, "--markdown", str(page)])
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in agent_sessions.Methods.NAMES)
    assert "479 requests of 12 sessions" in printed
    assert printed.strip() in page.read_text()
    result = agent_sessions.run(requests, hours=0.1, seed=0)
    last = dict(zip(agent_sessions.Methods.NAMES, result.scores[-1], strict=True))
    assert last["ridge + memory"][0] > last["mean of session"][0] > 0.3
    low = result.gains["previous output"][1]
    assert low > 0


def test_a_request_is_learned_at_its_end_only() -> None:
    requests = [
        agent_sessions.AgentRequest("a", "a", start, end, "m", 0, 0, 10, 10, False, 100)
        for start, end in ((0.0, 50.0), (20.0, 30.0))
    ]
    rows = agent_sessions.events(requests, hours=1.0, seed=0)
    assert [(is_arrival, number) for _, is_arrival, number in rows] == [
        (True, 0),
        (True, 1),
        (False, 1),
        (False, 0),
    ]
