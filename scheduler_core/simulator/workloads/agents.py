"""Sessions of agents in a closed loop, recorded or drawn: growing contexts, pauses for tools, sub-agents."""

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.table_files import file_rows
from scheduler_core.simulator.content import session_content
from scheduler_core.simulator.trace import MAX_REQUESTS, MAX_TIME_S, MAX_TOKENS, TraceRequest, read_number
from scheduler_core.simulator.workloads.lengths import TokenDistribution

#: Columns of a file of recorded sessions -> column of a trace with the same range; the first four are required.
_NUMBERS = {
    "input_tokens": "prompt_tokens", "output_tokens": "prefix_tokens", "cached_tokens": "prefix_tokens",
    "think_time_s": "think_time_s", "time_s": "arrival_s",
}  # fmt: skip
_REQUIRED = ("session", "input_tokens", "output_tokens", "cached_tokens", "think_time_s")
_TEXTS = ("session", "agent", "stop", "input_types")
_MAIN = "main"
TOOL_RESULT, TEXT, TOOL_USE, END_TURN = "tool_result", "text", "tool_use", "end_turn"


class _Turn(NamedTuple):
    """A request of an agent; `prefix_tokens` of its prompt are those of the turn before, which ended `pause_s` earlier."""

    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int
    pause_s: float
    category: str
    ended_by: str
    time_s: float = 0.0


class _SubAgent(NamedTuple):
    """An agent that starts when turn `parent` of the main agent ends, and ends before the turn after it."""

    name: str
    parent: int
    turns: list[_Turn]


class _Session(NamedTuple):
    """Turns of the main agent, and the sub-agents."""

    turns: list[_Turn]
    sub_agents: tuple[_SubAgent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PauseDistribution:
    """Distribution of pauses: exp(mu + sigma t_nu) seconds, log-t; about lognormal with a large nu."""

    mu: float = 2.3
    """Location of ln seconds."""
    sigma: float = 1.0
    """Scale of ln seconds."""
    nu: float = 3.5
    """Degrees of freedom."""

    def __post_init__(self) -> None:
        check_ranges(self, mu=(-FINITE, FINITE), sigma=(0.0, FINITE), nu=(POSITIVE, FINITE))

    def draw(self, num: int, rng: np.random.Generator) -> list[float]:
        """Pauses in seconds; a list of `num`."""
        logs = np.clip(self.mu + self.sigma * rng.standard_t(self.nu, num), -20.0, math.log(MAX_TIME_S))
        return [float(pause_s) for pause_s in np.exp(logs)]


#: Distributions of drawn sessions, about those of recorded coding agents.
_FIRST_PROMPT = TokenDistribution(kind="log_t", mu=10.1, sigma=0.7, low=1000, high=200_000)
_GROWTH = TokenDistribution(kind="log_t", mu=5.9, sigma=1.3, high=100_000)
_OUTPUT = TokenDistribution(kind="log_t", mu=5.4, sigma=0.6, high=16_384)
_TURNS = TokenDistribution(kind="log_t", mu=3.8, sigma=0.9, high=500)


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Agent sessions in a closed loop: a turn arrives a pause after the end of the turn before it. When a session ends, the
    next one starts in its place, so that the number of sessions is constant."""

    num_sessions: int = 16
    """Number of sessions at the same time."""
    file: str | None = None
    """Recorded sessions, which are used in random order, again under new ids when all have been used: a table with columns
    session, input_tokens, output_tokens, cached_tokens (leading input tokens known from the agent's turn before) and
    think_time_s (pause before the request); optional agent (main, or a name for each sub-agent), time_s (orders main agent
    and sub-agents), stop (tool_use, end_turn) and input_types (with tool_result or not). Unset: sessions are drawn."""
    turns: TokenDistribution | None = None
    """Number of turns of a session (of its main agent); kind fixed: always low. Unset: all recorded ones, or log_t with a
    median of 45."""
    first_prompt: TokenDistribution | None = None
    """Tokens of the first prompt of a drawn session. Unset: log_t with a median of 24,000."""
    growth: TokenDistribution | None = None
    """New tokens in the prompt of each later turn of a drawn session, after the context before (prompt and output). Unset:
    log_t with a median of 365."""
    output: TokenDistribution | None = None
    """Output tokens of each turn of a drawn session. Unset: log_t with a median of 220."""
    pause: PauseDistribution | None = None
    """Pauses before turns. Unset: recorded ones, or log-t with a median of 10 s."""
    max_pause_s: float | None = None
    """Longest pause; longer ones are shortened to it. Unset: no limit."""
    ramp_up_s: float = 60.0
    """The first sessions start at random times up to this one."""
    scale: float = 1.0
    """Factor of all numbers of tokens, for engines with a shorter context than the recorded one."""
    max_tokens: int | None = None
    """max_tokens of every request; longer outputs are truncated. Unset: the longest output."""
    max_tokens_per_request: int | None = None
    """Longest prompt and output together, after scaling: an agent ends before the first turn that exceeds it, and a session
    whose first turn does is left out. Unset: no limit."""

    def __post_init__(self) -> None:
        check_ranges(self, num_sessions=(1, MAX_REQUESTS), scale=(POSITIVE, FINITE))
        check_ranges(self, max_pause_s=(0.0, MAX_TIME_S), ramp_up_s=(0.0, MAX_TIME_S))
        check_ranges(self, max_tokens=(1, MAX_TOKENS), max_tokens_per_request=(2, 2 * MAX_TOKENS))
        for name in ("first_prompt", "growth", "output"):
            if self.file is not None and getattr(self, name) is not None:
                raise InputError(f"agents.{name}", getattr(self, name), "unset together with agents.file")

    def requests(self, num_requests: int, seed: int) -> tuple[list[TraceRequest], str]:
        """Requests of all sessions in no particular order, at least `num_requests`, the same number for each of the
        sessions at a time; and what was left out, as a sentence (empty: nothing). More requests only continue the same sessions.

        A parent waits for its sub-agents. `arrival_s` is the earliest possible arrival, as if outputs took no time.
        `InputError` if the file is invalid, or no session is short enough.
        """
        sessions, problem = self._recorded() if self.file is not None else ([], "")
        start_rng, order_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        starts = start_rng.uniform(0.0, self.ramp_up_s, self.num_sessions).tolist()
        order: list[int] = []
        rows: list[TraceRequest] = []
        quota = math.ceil(num_requests / self.num_sessions)
        for slot, start_s in enumerate(starts):
            of_slot: list[TraceRequest] = []
            ends: dict[str, float] = {}
            for number in itertools.count(slot, self.num_sessions):
                rng = np.random.default_rng([seed, number])
                while sessions and len(order) <= number:
                    order.extend(order_rng.permutation(len(sessions)).tolist())
                session = sessions[order[number]] if sessions else self._draw(rng)
                of_slot += _rows(f"s{number}", self._changed(session, rng), start_s, ends)
                if len(of_slot) >= quota:
                    break
            rows += of_slot[:quota]  # a row only waits for earlier ones
        max_tokens = self.max_tokens or max(row.output_tokens for row in rows)
        return [replace(row, max_tokens=max_tokens) for row in rows], problem

    @property
    def _limit(self) -> int:
        return self.max_tokens_per_request or MAX_TOKENS

    def _tokens(self, num: float) -> int:
        return max(1, round(num * self.scale))

    def _output(self, num: float) -> int:
        return min(self._tokens(num), self.max_tokens or MAX_TOKENS)

    def _recorded(self) -> tuple[list[_Session], str]:
        """Scaled sessions of the file, as far as they are short enough, and how many are not."""
        assert self.file is not None
        recorded = read_sessions(self.file)
        sessions = [self._scaled(session) for session in recorded]
        num_short = sum(
            bool(short.turns) and _num_turns(short) < _num_turns(whole)
            for short, whole in zip(sessions, recorded, strict=True)
        )
        sessions = [session for session in sessions if session.turns]
        num_without = len(recorded) - len(sessions)
        if not sessions:
            allowed = f"more, for at least one session of {self.file}"
            raise InputError("agents.max_tokens_per_request", self.max_tokens_per_request, allowed)
        if not num_short and not num_without:
            return sessions, ""
        return sessions, (
            f"requests with more than max_tokens_per_request = {self._limit} tokens are left out: {num_short} of "
            f"{len(recorded)} sessions end early, {num_without} are left out"
        )

    def _scaled(self, session: _Session) -> _Session:
        turns = self._scaled_turns(session.turns)
        agents = [agent._replace(turns=self._scaled_turns(agent.turns)) for agent in session.sub_agents]
        return _Session(
            turns, tuple([agent for agent in agents if agent.turns and agent.parent < len(turns)])
        )

    def _scaled_turns(self, turns: list[_Turn]) -> list[_Turn]:
        scaled = []
        for turn in turns:
            prompt, output = math.ceil(turn.prompt_tokens * self.scale), self._output(turn.output_tokens)
            if prompt + output > self._limit:
                break
            prefix = min(int(turn.prefix_tokens * self.scale), prompt - 1)
            scaled.append(turn._replace(prompt_tokens=prompt, output_tokens=output, prefix_tokens=prefix))
        return scaled

    def _draw(self, rng: np.random.Generator) -> _Session:
        num = int((self.turns or _TURNS).draw(1, rng)[0])
        first = self._tokens((self.first_prompt or _FIRST_PROMPT).draw(1, rng)[0])
        growths = (self.growth or _GROWTH).draw(num, rng).tolist()
        outputs = [self._output(length) for length in (self.output or _OUTPUT).draw(num, rng)]
        pauses = (self.pause or PauseDistribution()).draw(num, rng)
        output = min(outputs[0], self._limit - 1)
        turns = [_Turn(min(first, self._limit - output), output, 0, 0.0, TEXT, TOOL_USE)]
        for growth, output, pause_s in zip(growths[1:], outputs[1:], pauses[1:], strict=True):
            context = turns[-1].prompt_tokens + turns[-1].output_tokens
            prompt = context + self._tokens(growth)
            if prompt + output > self._limit:
                break
            turns.append(_Turn(prompt, output, context, pause_s, TOOL_RESULT, TOOL_USE))
        turns[-1] = turns[-1]._replace(ended_by=END_TURN)
        return _Session(turns)

    def _changed(self, session: _Session, rng: np.random.Generator) -> _Session:
        """With the number of turns and the pauses of the options."""
        num = len(session.turns)
        if self.turns is not None and self.file is not None:
            num = int(self.turns.draw(1, rng)[0])
        agents = [agent for agent in session.sub_agents if agent.parent < num]
        agents = [agent._replace(turns=self._paused(agent.turns, rng)) for agent in agents]
        return _Session(self._paused(session.turns[:num], rng), tuple(agents))

    def _paused(self, turns: list[_Turn], rng: np.random.Generator) -> list[_Turn]:
        pauses = [turn.pause_s for turn in turns]
        if self.pause is not None and self.file is not None:
            pauses = [0.0, *self.pause.draw(len(turns) - 1, rng)]
        longest = MAX_TIME_S if self.max_pause_s is None else self.max_pause_s
        return [
            turn._replace(pause_s=min(pause_s, longest)) for turn, pause_s in zip(turns, pauses, strict=True)
        ]


def _num_turns(session: _Session) -> int:
    """Number of turns of all agents."""
    return len(session.turns) + sum(len(agent.turns) for agent in session.sub_agents)


def _rows(name: str, session: _Session, start_s: float, ends: dict[str, float]) -> list[TraceRequest]:
    """The requests of a session.

    Args:
        name: Its id.
        start_s: Time at which it starts, unless there are `ends`.
        ends: Earliest ends of the requests after which it starts, by id; replaced by those of its last turn and the
            sub-agents that this one started.
    """
    rows: list[TraceRequest] = []
    for number, row in enumerate(_agent_rows(name, session.turns)):
        arrival_s = max(ends.values(), default=start_s) + (row.think_time_s or 0.0)
        is_plain = number > 0 and len(ends) == 1
        think_time_s = row.think_time_s if ends else None
        after = [] if is_plain else [*ends]
        rows.append(replace(row, arrival_s=arrival_s, think_time_s=think_time_s, after=tuple(after)))
        ends.clear()
        ends[row.request_id] = arrival_s
        for agent in session.sub_agents:
            if agent.parent == number:
                end_s, after = arrival_s, [row.request_id]
                for sub_row in _agent_rows(f"{name}/{agent.name}", agent.turns):
                    end_s += sub_row.think_time_s or 0.0
                    rows.append(replace(sub_row, arrival_s=end_s, after=tuple(after)))
                    after = []
                ends[rows[-1].request_id] = end_s
    return rows


def _agent_rows(name: str, turns: list[_Turn]) -> list[TraceRequest]:
    """Requests of one agent, without arrivals and max_tokens."""
    rows = [
        TraceRequest(
            request_id=f"{name}t{number}",
            arrival_s=0.0,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            max_tokens=turn.output_tokens,
            category=turn.category,
            session_id=name,
            turn=number,
            think_time_s=turn.pause_s,
            prefix_tokens=turn.prefix_tokens,
            ended_by=turn.ended_by,
        )
        for number, turn in enumerate(turns)
    ]
    contents = session_content(rows)
    return [replace(row, content=content) for row, content in zip(rows, contents, strict=True)]


def read_sessions(path: str) -> tuple[_Session, ...]:
    """Recorded sessions, see `Agents.file`. Unchanged files are cached. `InputError` if a column is missing or invalid."""
    file = existing_file(path, "agents.file")
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: Path, _modified_ns: int) -> tuple[_Session, ...]:
    sessions: dict[str, dict[str, list[_Turn]]] = {}
    for number, row in file_rows(file, "agents.file", (*_NUMBERS, *_TEXTS)):
        location = f"{file.name} row {number}"
        for name in _REQUIRED:
            if name not in row:
                raise InputError(
                    f"{location} column {name}", ", ".join(map(str, row)), "a table with this column"
                )
        if row["session"] in (None, ""):
            raise InputError(f"{location} column session", row["session"], "a name")
        values = {
            name: read_number(location, name, value, range_of=column)
            for name, column in _NUMBERS.items()
            # A pause is not known if the request before was not answered.
            if (value := row.get(name)) not in (None, "") and value == value
        }
        for name in ("input_tokens", "output_tokens"):
            if name not in values:
                raise InputError(f"{location} column {name}", row[name], "a number of tokens")
        turn = _Turn(
            prompt_tokens=int(values["input_tokens"]),
            output_tokens=max(1, int(values["output_tokens"])),
            prefix_tokens=min(int(values.get("cached_tokens", 0)), int(values["input_tokens"]) - 1),
            pause_s=values.get("think_time_s", 0.0),
            category=TOOL_RESULT if TOOL_RESULT in str(row.get("input_types") or "").split("+") else TEXT,
            ended_by=str(row.get("stop") or ""),
            time_s=values.get("time_s", 0.0),
        )
        sessions.setdefault(str(row["session"]), {}).setdefault(str(row.get("agent") or _MAIN), []).append(
            turn
        )
    if not sessions:
        raise InputError("agents.file", str(file), "a file with at least one row")
    return tuple([_session(agents) for agents in sessions.values()])


def _session(agents: dict[str, list[_Turn]]) -> _Session:
    """A session from the turns of its agents; without an agent named main, the first one is it."""
    main = _MAIN if _MAIN in agents else next(iter(agents))
    times = [turn.time_s for turn in agents[main]]
    return _Session(
        agents[main],
        tuple(
            [
                _SubAgent(
                    name.removeprefix(f"{main}/"), max(bisect_right(times, turns[0].time_s) - 1, 0), turns
                )
                for name, turns in agents.items()
                if name != main
            ]
        ),
    )
