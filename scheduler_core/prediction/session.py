"""Sessions: what is known of the next request of an agent or chat session, for the memory of past requests.

Where a request is one of a session, the session's earlier outputs and what is new in its input say more about the length of
its output than most texts do, and they are known also where texts are not. `SessionStates` keeps this state online;
`session_of` derives it, without state, from the messages of a request, which contain the earlier outputs.

The features of a request are x = (1, x_1, ..., x_8), each x_i = s_i (z_i - c_i) clipped to +-3, and 0 if z_i is unknown:

    i  z_i                                               c_i    s_i
    1  ln tokens of the last output                      5.5    1
    2  ln mean tokens of the outputs                     5.5    2
    3  ln(1 + turns before)                              3      0.5
    4  ln(1 + tokens of the input)                       11     0.5
    5  ln(1 + new tokens of the input)                   6.5    1.2
    6  input is the result of a tool: 1, else 0          0.8    2
    7  ln(1 + seconds since the last output)             2.5    0.8
    8  depth of the sub-agent                            0      1

and their embedding is the unit vector x / |x|, so that requests with similar features have a large product.
`SessionPredictor` is a linear regression of ln tokens on x, for requests without a text, to which memory and linear
correction are then applied as to any other prediction.

`session_context` is the one call for what a `Correction` knows of such a request.

`python -m benchmarks.correcting.agent_sessions` compares them on recorded sessions of coding agents.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths.student_t import student_t_cdf, student_t_hazard
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.predictions import Embedding, LengthPrediction
from scheduler_core.prediction.prompt_text import ASSISTANT, OPTIONS, TOOL, Message
from scheduler_core.ranges import check_ranges

#: c and s of the features, and their largest absolute value.
CENTERS = (5.5, 5.5, 3.0, 11.0, 6.5, 0.8, 2.5, 0.0)
SCALES = (1.0, 2.0, 0.5, 0.5, 1.2, 2.0, 0.8, 1.0)
MAX_FEATURE = 3.0
#: Length of x and of its embedding.
NUM_FEATURES = 1 + len(CENTERS)
#: Weight of the newest output in the mean of a session, from the fifth output on; before that, all have the same weight.
NEWEST = 0.2
#: Characters per token, where only texts are known.
TOKEN_CHARS = 4
#: Weight of a session in the product of two joined embeddings.
SESSION_WEIGHT = 0.3
#: How an output ends that calls a tool, and one that leaves the turn to the user.
TOOL_USE, END_TURN = "tool_use", "end_turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFeatures:
    """What is known of a request of a session before its output. None: unknown, or there was no output yet.

    Attributes:
        turn: Outputs of the session before this request.
        last_output_tokens: Tokens of the last output.
        mean_output_tokens: Geometric mean of the outputs, of which the newest has the weight `NEWEST`.
        input_tokens: Tokens of the whole input.
        new_input_tokens: Tokens of the input that no earlier input or output of the session contains.
        is_tool_result: Whether the input ends with the result of a tool, and not with a text of the user.
        pause_s: Seconds since the end of the last output.
        depth: 0 for the main agent, 1 for its sub-agents.
    """

    turn: int = 0
    last_output_tokens: float | None = None
    mean_output_tokens: float | None = None
    input_tokens: int | None = None
    new_input_tokens: int | None = None
    is_tool_result: bool = False
    pause_s: float | None = None
    depth: int = 0

    def vector(self) -> NDArray[np.float64]:
        """The features x [NUM_FEATURES] of the table above."""
        values = (
            _log(self.last_output_tokens, 0.0),
            _log(self.mean_output_tokens, 0.0),
            math.log1p(self.turn),
            _log(self.input_tokens, 1.0),
            _log(self.new_input_tokens, 1.0),
            float(self.is_tool_result),
            _log(self.pause_s, 1.0),
            float(self.depth),
        )
        x = [
            0.0 if value is None else min(max(scale * (value - center), -MAX_FEATURE), MAX_FEATURE)
            for value, center, scale in zip(values, CENTERS, SCALES, strict=True)
        ]
        return np.array([1.0, *x])

    def embedding(self) -> Embedding:
        """The unit vector [NUM_FEATURES] of these features, for `RequestContext.embedding`."""
        x = self.vector()
        return (x / math.sqrt(x @ x)).astype(np.float32)


def joined(text: Embedding, session: Embedding, weight: float = SESSION_WEIGHT) -> Embedding:
    """One unit vector [D + S] of the embeddings of a prompt [D] and of its session [S]; their products have the weights
    1 - weight and weight in that of joined vectors. The embeddings of one memory are either all joined, or none."""
    parts = (math.sqrt(1.0 - weight) * text, math.sqrt(weight) * session)
    return np.concatenate(parts).astype(np.float32)


def request_embedding(text: Embedding | None, messages: Sequence[Message] = ()) -> Embedding | None:
    """The unit vector [D + S] of a request from the embedding of its prompt [D] and its messages: `joined` with its session if
    there were outputs before it, otherwise zeros in place of the session, so that first requests are compared by their
    texts alone. None without an embedding of the prompt."""
    if text is None:
        return None
    return _with_features(text, session_of(messages))


def _with_features(text: Embedding, features: SessionFeatures) -> Embedding:
    """A text's embedding, `joined` with the features of its session if there were outputs before it, otherwise with zeros."""
    if features.turn:
        return joined(text, features.embedding())
    return np.concatenate((text, np.zeros(NUM_FEATURES, np.float32)))


def session_of(messages: Sequence[Message], input_tokens: int | None = None) -> SessionFeatures:
    """The features of a request from its messages: the outputs before it are those of the assistant, one for each run of
    consecutive messages. Tokens are estimated by `TOKEN_CHARS`; those of the whole input may be known."""
    outputs: list[int] = []
    total = since = 0
    after_output = False
    for message in messages:
        if message.role == OPTIONS:
            continue
        size = len(message.text)
        total += size
        is_output = message.role == ASSISTANT
        if is_output and after_output:
            outputs[-1] += size
        elif is_output:
            outputs.append(size)
        since = 0 if is_output else since + size
        after_output = is_output
    state = _State()
    for size in outputs:
        state = state.after(max(size // TOKEN_CHARS, 1), None, None)
    return SessionFeatures(
        turn=state.num_outputs,
        last_output_tokens=state.last_output_tokens,
        mean_output_tokens=state.mean_output_tokens,
        input_tokens=total // TOKEN_CHARS if input_tokens is None else input_tokens,
        new_input_tokens=since // TOKEN_CHARS,
        is_tool_result=bool(messages) and messages[-1].role == TOOL,
    )


@dataclass(frozen=True, slots=True)
class _State:
    """What is kept of a session; `context_tokens` are its last input and output."""

    num_outputs: int = 0
    last_output_tokens: float | None = None
    mean_log: float = 0.0
    context_tokens: int | None = 0
    end_s: float | None = None
    calls_tool: bool = False

    @property
    def mean_output_tokens(self) -> float | None:
        return math.exp(self.mean_log) if self.num_outputs else None

    def after(
        self, output_tokens: int, context_tokens: int | None, end_s: float | None, calls_tool: bool = False
    ) -> "_State":
        """The state after a further output."""
        num = self.num_outputs + 1
        step = math.log(output_tokens) - self.mean_log
        mean_log = self.mean_log + max(NEWEST, 1.0 / num) * step
        return _State(num, float(output_tokens), mean_log, context_tokens, end_s, calls_tool)


class SessionStates:
    """States of the `max_sessions` sessions that were used last. Not for several threads at once.

    A session is any string; sub-agents whose contexts are their own are sessions of their own. Times are of one clock.
    """

    def __init__(self, max_sessions: int = 10_000) -> None:
        self.max_sessions = max_sessions
        check_ranges(self, max_sessions=(1, 100_000_000))
        self._states: OrderedDict[str, _State] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def features(
        self,
        session: str,
        *,
        now: float | None = None,
        input_tokens: int | None = None,
        new_input_tokens: int | None = None,
        is_tool_result: bool | None = None,
        depth: int = 0,
    ) -> SessionFeatures:
        """What is known of the next request of a session, which may be new; `now` is its arrival in seconds.

        Without `new_input_tokens` they are those beyond the last input and output, or, if the input is shorter than these,
        because the session was compacted, all of it. Without `is_tool_result`, it is one after an output that called a tool.
        """
        state = self._states.get(session, _State())
        if new_input_tokens is None and input_tokens is not None and state.context_tokens is not None:
            beyond = input_tokens - state.context_tokens
            new_input_tokens = beyond if beyond >= 0 else input_tokens
        pause_s = None if now is None or state.end_s is None else max(now - state.end_s, 0.0)
        return SessionFeatures(
            turn=state.num_outputs,
            last_output_tokens=state.last_output_tokens,
            mean_output_tokens=state.mean_output_tokens,
            input_tokens=input_tokens,
            new_input_tokens=new_input_tokens,
            is_tool_result=state.calls_tool if is_tool_result is None else is_tool_result,
            pause_s=pause_s,
            depth=depth,
        )

    def observe(
        self,
        session: str,
        *,
        output_tokens: int,
        input_tokens: int | None = None,
        now: float | None = None,
        ended_by: str = "",
    ) -> None:
        """Adds an ended request; `now` is the end of its output in seconds, and `ended_by` how it ended, such as `TOOL_USE`.
        `InputError` for an output without tokens."""
        if output_tokens < 1:
            raise InputError("output_tokens", output_tokens, "integers > 0")
        state = self._states.pop(session, _State())
        context_tokens = None if input_tokens is None else input_tokens + output_tokens
        self._states[session] = state.after(output_tokens, context_tokens, now, ended_by == TOOL_USE)
        if len(self._states) > self.max_sessions:
            self._states.popitem(last=False)

    def forget(self, session: str) -> None:
        """Drops a session that has ended, if it is there."""
        self._states.pop(session, None)


def session_context(context: RequestContext, states: SessionStates, session: str) -> RequestContext:
    """The context of a session's request, with an embedding of the session's features: `joined` with that of its text if it
    has one. As with `request_embedding`, zeros stand for the session of a text without outputs before it. `session` is empty
    for a request without one.

    To be called at the arrival of a request, and at its end before `SessionStates.observe`; the result is the same if the
    session had no other request in between. The pause before the request is not used.
    """
    text = context.embedding
    features = states.features(session, input_tokens=context.prompt_tokens) if session else SessionFeatures()
    if text is None:
        return replace(context, embedding=features.embedding()) if session else context
    return replace(context, embedding=_with_features(text, features))


class RecursiveRegression:
    """Recursive ridge regression of y on features x [F], whose coefficients shrink to 0, and y to `center`. Observations are
    forgotten at the rate 1 / `memory`; `precision` [F] is that of the prior of the coefficients."""

    def __init__(self, precision: Sequence[float], center: float, memory: int) -> None:
        self._prior, self._center, self._decay = np.diag(precision), center, 1.0 - 1.0 / memory
        num = len(precision)
        #: Sums x x^T [F, F] and (y - center) x [F].
        self._gram, self._response = np.zeros((num, num)), np.zeros(num)
        self._coefficients: NDArray[np.float64] | None = np.zeros(num)

    def predict(self, x: NDArray[np.float64]) -> float:
        """The expectation of y."""
        if self._coefficients is None:
            solution = np.linalg.solve(self._gram + self._prior, self._response)
            self._coefficients = np.asarray(solution, np.float64)
        return self._center + float(self._coefficients @ x)

    def observe(self, x: NDArray[np.float64], y: float, weight: float = 1.0) -> None:
        """Adds an observation."""
        self._gram = self._decay * self._gram + weight * x[:, None] * x
        self._response = self._decay * self._response + weight * (y - self._center) * x
        self._coefficients = None

    def state(self) -> dict[str, Any]:
        """The sums as JSON content."""
        return {"gram": self._gram.tolist(), "response": self._response.tolist()}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if the content is invalid."""
        gram, response = np.array(content["gram"], float), np.array(content["response"], float)
        if gram.shape != self._gram.shape or response.shape != self._response.shape:
            raise ValueError("gram, response")
        if not (np.isfinite(gram).all() and np.isfinite(response).all() and np.allclose(gram, gram.T)):
            raise ValueError("gram, response")
        if np.linalg.eigvalsh(gram).min() <= -1e-6:
            raise ValueError("gram")
        self._gram, self._response, self._coefficients = gram, response, None


class SessionPredictor:
    """Recursive ridge regression of ln tokens on x; its predictions are log-t with a constant sigma, which is left to the
    corrections that follow. Outputs are forgotten at the rate 1 / `memory`. Not for several threads at once."""

    #: Of the prior: mean of ln tokens, precision of the coefficients and of the intercept; sigma and nu of predictions.
    PRIOR_MEAN, PRECISION, INTERCEPT_PRECISION = 5.4, 20.0, 2.0
    SIGMA, NU = 0.65, 3.5

    def __init__(self, memory: int = 20_000) -> None:
        self.memory = memory
        check_ranges(self, memory=(10, 100_000_000))
        precision = (self.INTERCEPT_PRECISION, *(self.PRECISION for _ in CENTERS))
        self._regression = RecursiveRegression(precision, self.PRIOR_MEAN, memory)

    def predict(self, features: SessionFeatures) -> LengthPrediction:
        """The predicted length of the output."""
        mu = self._regression.predict(features.vector())
        return LengthPrediction(min(max(mu, 0.0), 20.0), self.SIGMA, self.NU)

    def observe(self, features: SessionFeatures, output_tokens: int, *, finished: bool = True) -> None:
        """Adds an output. A censored one has the expectation of ln X given that X is longer, with the weight of the fraction
        of lengths that this excludes. `InputError` for an output without tokens."""
        if output_tokens < 1:
            raise InputError("output_tokens", output_tokens, "integers > 0")
        log_length, weight = math.log(output_tokens), 1.0
        if not finished:
            predicted = self.predict(features)
            z = (log_length - predicted.mu) / predicted.sigma
            weight = student_t_cdf(z, self.NU)
            z = max(z, student_t_hazard(z, self.NU) * (self.NU + z * z) / (self.NU - 1.0))
            log_length = predicted.mu + predicted.sigma * z
        self._regression.observe(features.vector(), log_length, weight)


def _log(value: float | None, offset: float) -> float | None:
    return None if value is None else math.log(max(value + offset, 1e-9))
