"""Responses of generation APIs: tokens and finish reason of a response, or of an event of a stream, of any of them.

| API | events with output | number of tokens | finish reason |
|---|---|---|---|
| OpenAI chat, completions, vLLM generate | `choices`: `delta`, `text`, `token_ids` | `usage.completion_tokens` | `finish_reason` |
| OpenAI Responses | `response.*.delta` | `usage.output_tokens` | `status`, `incomplete_details` |
| Anthropic messages | `content_block_*` | `usage.output_tokens` | `stop_reason` |
| Ollama | `message`, `response`, `thinking` | `eval_count` | `done_reason` |
| SGLang generate | `text`, `output_ids` | `meta_info.completion_tokens` | `meta_info.finish_reason` |
| llama.cpp | `content` | `tokens_predicted`, `timings.predicted_n` | `stop_type` |
| TGI | `token` | `details.generated_tokens` | `details.finish_reason` |

Tokens of the prompt that the engine's prefix cache had are `prompt_tokens_details.cached_tokens` of OpenAI chat,
`input_tokens_details.cached_tokens` of Responses, `cache_read_input_tokens` of Anthropic and `cached_tokens` of SGLang. vLLM
reports them with `--enable-prompt-tokens-details`, SGLang with `--enable-cache-report`.

Reading never fails: what is missing or malformed is not reported. Reasoning, refusals, audio and calls of tools are output, as text is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler_core.prediction.api_request import MAX_TOKENS

#: Finish reasons of outputs that call a tool.
CALLS_TOOL = frozenset({"tool_calls", "tool_use", "function_call"})
#: Items of a response of the Responses API that its client answers with the result of a tool.
_CALLS = frozenset(
    {
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "computer_call",
    }
)
#: Finish reasons of complete outputs, and of outputs that were truncated at a limit of tokens; in lower case.
COMPLETE = frozenset(
    {"stop", "completed", "eos", "eos_token", "stop_sequence", "stop_token", "end_turn", "pause_turn"}
    | CALLS_TOOL
)
TRUNCATED = frozenset(
    {"length", "limit", "max_tokens", "max_output_tokens", "max_new_tokens", "model_context_window_exceeded"}
)
#: `status` of a response of the Responses API -> finish reason; other ones are not final.
_STATUS = {"completed": "stop", "incomplete": "incomplete", "failed": "error", "cancelled": "abort"}
#: Members of an output that are no output themselves.
_LABELS = frozenset(
    {"role", "id", "call_id", "type", "index", "status", "format", "signature", "annotations", "logprobs"}
)
_MAX_DEPTH = 8


@dataclass(slots=True)
class ApiResponse:
    """The fields of a response or of an event; None and "" if it does not report them.

    Attributes:
        num_new_tokens: Output tokens of an event: those that it lists, otherwise 1 if it has output of any kind.
        output_tokens, prompt_tokens: Numbers of tokens of the output so far and of the prompt, as counted by the engine.
        cached_tokens: Number of tokens of the prompt that the engine's prefix cache had.
        finish_reason: In the words of the API; see `COMPLETE` and `TRUNCATED`. tool_calls for a response of the Responses API
            that calls a tool.
        num_outputs: Number of outputs, at least; 0 without any.
        response_id: Of the Responses API, whose requests can continue a response.
    """

    num_new_tokens: int = 0
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    num_outputs: int = 0
    response_id: str = ""


def read_response(content: object) -> ApiResponse:
    """Reads a parsed JSON response or event; see the table above."""
    if isinstance(content, list):
        return read_response(content[0]) if len(content) == 1 else ApiResponse(num_outputs=len(content))
    response = ApiResponse()
    if not isinstance(content, dict):
        return response
    kind = content.get("type")
    if isinstance(choices := content.get("choices"), list):
        _read_choices(response, content, choices)
    elif isinstance(kind, str) and kind.startswith("response."):
        _read_responses_event(response, kind, content)
    elif content.get("object") == "response":
        _read_responses(response, content)
    elif isinstance(kind, str):
        _read_anthropic(response, kind, content)
    elif "done" in content:
        response.num_new_tokens = int(
            any(map(has_output, map(content.get, ("message", "response", "thinking"))))
        )
        response.finish_reason = _text(content.get("done_reason"))
        _take_counts(response, content, "eval_count", "prompt_eval_count")
    elif isinstance(meta := content.get("meta_info"), dict):
        response.num_new_tokens = int(has_output(content.get("text")) or bool(content.get("output_ids")))
        reason = meta.get("finish_reason")
        response.finish_reason = _text(reason.get("type") if isinstance(reason, dict) else reason)
        _take_counts(response, meta, "completion_tokens", "prompt_tokens")
    elif "generated_text" in content or "token" in content:
        response.num_new_tokens = int(isinstance(content.get("token"), dict))
        details = content.get("details")
        response.finish_reason = _text(_member(details, "finish_reason"))
        _take_counts(response, details, "generated_tokens", "input_length")
    elif "stop" in content or "tokens_predicted" in content:
        _read_llama_cpp(response, content)
    else:
        _take_counts(response, content.get("usage"), "completion_tokens", "prompt_tokens")
    if content.get("error") or kind == "error":
        response.finish_reason = response.finish_reason or "error"
    if response.num_new_tokens or response.finish_reason:
        response.num_outputs = max(1, response.num_outputs)
    return response


def _read_choices(response: ApiResponse, content: dict[str, Any], choices: list[Any]) -> None:
    """Reads OpenAI's chat and completions, and the endpoints of engines that are like them."""
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        index = choice.get("index")
        response.num_outputs = max(response.num_outputs + 1, index + 1 if type(index) is int else 0)
        token_ids, delta = choice.get("token_ids"), choice.get("delta")
        if isinstance(token_ids, list) and token_ids:
            response.num_new_tokens += len(token_ids)
        elif has_output(delta if delta is not None else choice.get("text")):
            response.num_new_tokens += 1
        response.finish_reason = _text(choice.get("finish_reason")) or response.finish_reason
    timings = content.get("timings")
    _take_counts(response, timings, "predicted_n", "prompt_n")
    if response.prompt_tokens is not None and (cached := _count(_member(timings, "cache_n"))) is not None:
        response.prompt_tokens += cached  # llama.cpp has only counted the others
        response.cached_tokens = cached
    _take_counts(response, content.get("usage"), "completion_tokens", "prompt_tokens")


def _read_responses_event(response: ApiResponse, kind: str, content: dict[str, Any]) -> None:
    if kind.endswith(".delta"):
        response.num_new_tokens = int(has_output(content.get("delta")))
    elif kind == "response.output_item.added":  # the name of a tool comes before its arguments
        response.num_new_tokens = int(has_output(_member(content.get("item"), "name")))
    elif isinstance(inner := content.get("response"), dict):
        _read_responses(response, inner)


def _read_responses(response: ApiResponse, content: dict[str, Any]) -> None:
    reason = _STATUS.get(_text(content.get("status")), "")
    if reason == "incomplete":
        reason = _text(_member(content.get("incomplete_details"), "reason")) or reason
    output = content.get("output")
    if reason == "stop" and isinstance(output, list):
        types = {_text(_member(item, "type")) for item in output}
        reason = "tool_calls" if types & _CALLS else reason
    response.finish_reason = reason
    response.response_id = _text(content.get("id"))
    _take_counts(response, content.get("usage"), "output_tokens", "input_tokens")


def _read_anthropic(response: ApiResponse, kind: str, content: dict[str, Any]) -> None:
    usage, delta = content.get("usage"), content.get("delta")
    if kind == "content_block_delta":
        names = ("text", "thinking", "partial_json")
        response.num_new_tokens = int(any(has_output(_member(delta, name)) for name in names))
    elif kind == "content_block_start":
        names = ("text", "thinking", "name")
        block = content.get("content_block")
        response.num_new_tokens = int(any(has_output(_member(block, name)) for name in names))
    elif kind == "message_start":
        usage = _member(content.get("message"), "usage")
    elif kind == "message_delta":
        response.finish_reason = _text(_member(delta, "stop_reason"))
    elif kind == "message":
        response.finish_reason = _text(content.get("stop_reason"))
    # The first event of a stream has the number of tokens before the output.
    _take_counts(response, usage, "" if kind == "message_start" else "output_tokens", "input_tokens")
    cached = ("cache_creation_input_tokens", "cache_read_input_tokens")
    if response.prompt_tokens is not None:
        response.prompt_tokens += sum(_count(_member(usage, name)) or 0 for name in cached)


def _read_llama_cpp(response: ApiResponse, content: dict[str, Any]) -> None:
    response.num_new_tokens = int(has_output(content.get("content")))
    if content.get("stop") is True:
        is_truncated = content.get("stop_type") == "limit" or content.get("stopped_limit") is True
        response.finish_reason = "length" if is_truncated else "stop"
    _take_counts(response, content, "tokens_predicted", "tokens_evaluated")


def _take_counts(response: ApiResponse, source: object, output: str, prompt: str) -> None:
    """Sets the numbers of tokens from two members of an object; malformed ones are ignored."""
    if not isinstance(source, dict):
        return
    if (number := _count(source.get(output))) is not None:
        response.output_tokens = number
    if (number := _count(source.get(prompt))) is not None:
        response.prompt_tokens = number
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if (number := _count(_member(source.get(name), "cached_tokens"))) is not None:
            response.cached_tokens = number
    for name in ("cached_tokens", "cache_read_input_tokens"):
        if (number := _count(source.get(name))) is not None:
            response.cached_tokens = number


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _member(source: object, name: str) -> Any:
    return source.get(name) if isinstance(source, dict) else None


def ended_by(finish_reason: str) -> str:
    """How an output ended, in the words of Anthropic's API: tool_use, end_turn, or empty if it was truncated or is unknown."""
    reason = finish_reason.lower()
    if reason in CALLS_TOOL:
        return "tool_use"
    return "end_turn" if reason in COMPLETE else ""


def has_output(value: object, depth: int = _MAX_DEPTH) -> bool:
    """Whether an output, or a part of it such as `delta`, has a text that is not empty, except in members that only describe the output."""
    if isinstance(value, str):
        return bool(value)
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(has_output(item, depth - 1) for name, item in value.items() if name not in _LABELS)
    return isinstance(value, list) and any(has_output(item, depth - 1) for item in value)
