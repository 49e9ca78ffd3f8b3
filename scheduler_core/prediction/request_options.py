"""Options of a request that change the length of its output, as a short text that a predictor reads before its messages.

| option, in any API | text |
|---|---|
| effort of reasoning: `reasoning_effort`, `reasoning.effort`, `thinkingLevel`, `think` | [effort high] |
| thinking: `thinking`, `enable_thinking`, `thinking_budget`, `reasoning.max_tokens`, `thinkingConfig` | [thinking on], [thinking off], [thinking 2048] |
| `verbosity`, `text.verbosity` | [verbosity low] |
| format: `response_format`, `format`, `responseSchema`, `structured_outputs`, `guided_json`, ... | [json], [json name, age], [regex], [grammar], [choice 3] |
| limits of a schema, a regular expression or choices | before these: [size 120], see `format_size` |
| `min_tokens`, `min_new_tokens` | [min tokens 64] |
| `n`, `best_of` | [n 3] |
| `stop`, `stop_sequences`, `stopSequences` | [stop "\\n", "END"] |
| `tool_choice` | [tool required], [tool NAME] |
| `tools`, `functions` | [tools search: Search the web; calculate] |

`max_tokens` is none of them: models do not know it, and a prediction is truncated at it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scheduler_core.prediction.format_size import (
    choice_tokens,
    is_schema,
    regex_tokens,
    schema_tokens,
    size_of,
)
from scheduler_core.prediction.prompt_text import Read, is_list, member

#: Maximum numbers of names of tools or fields, of words of a description, and of characters of a text.
_MAX_NAMES, _MAX_WORDS, _MAX_CHARS = 16, 5, 40
_WORD = re.compile(r"[A-Za-z_]{1,16}")
#: Effort that switches thinking off.
_NO_EFFORT = ("none", "off", "false")
_CONSTRAINTS = {"guided_regex": "regex", "regex": "regex", "guided_grammar": "grammar", "grammar": "grammar", "ebnf": "grammar"}  # fmt: skip
_SCHEMAS = ("json", "guided_json", "json_schema", "schema", "responseSchema", "responseJsonSchema")
#: Members that are read, without those of other members.
_NAMES = frozenset((
    *("reasoning", "reasoning_effort", "thinkingConfig", "thinking_config", "thinking", "think", "thinking_budget"),
    *("thinking_token_budget", "enable_thinking", "chat_template_kwargs", "output_config", "verbosity", "text"),
    *("response_format", "format", "structured_outputs", "output_format", "guided_choice", "choice"),
    *("responseMimeType", "response_mime_type", "stop", "stop_sequences", "stopSequences", "tools", "functions"),
    *(*_SCHEMAS, *_CONSTRAINTS),
))  # fmt: skip


def options_text(
    sources: Sequence[object], readers: Sequence[Read], *, min_tokens: int = 0, num_outputs: int = 1
) -> str:
    """The text of the options of a request, which is empty without any; see the table above. `sources` are its body and the
    objects of its sampling parameters, and `readers` read their members."""
    counts = [("min tokens", min_tokens), ("n", num_outputs)]
    tags = [f"{name} {count}" for name, count in counts if count > 1]
    if not all(isinstance(source, dict) and _NAMES.isdisjoint(source) for source in sources):  # slower
        tags = [*_reasoning(readers), *_format(readers), *tags, *_stop(readers), *_tools(readers)]
    return " ".join(f"[{tag}]" for tag in tags)


def _first(readers: Sequence[Read], *names: str) -> Any:
    """The first member of one of these names that is set."""
    return next((value for name in names for read in readers if (value := read(name)) is not None), None)


def _reasoning(readers: Sequence[Read]) -> Iterator[str]:
    reasoning, gemini = _first(readers, "reasoning"), _first(readers, "thinkingConfig", "thinking_config")
    template = _first(readers, "chat_template_kwargs")
    think, thinking = _first(readers, "think"), _first(readers, "thinking")
    effort = next(
        (
            value.lower()
            for value in (
                _first(readers, "reasoning_effort"),
                member(reasoning, "effort"),
                member(_first(readers, "output_config"), "effort"),
                member(template, "reasoning_effort"),
                member(gemini, "thinkingLevel"),
                think,
            )
            if isinstance(value, str) and _WORD.fullmatch(value)
        ),
        "",
    )
    if effort and effort not in _NO_EFFORT:
        yield f"effort {effort}"
    budgets = (
        member(thinking, "budget_tokens"),
        member(reasoning, "max_tokens"),
        member(gemini, "thinkingBudget"),
        member(template, "thinking_budget"),
        _first(readers, "thinking_budget", "thinking_token_budget"),
    )
    budget = next((value for value in budgets if type(value) is int), None)
    kind = member(thinking, "type")
    switches = (
        {"enabled": True, "adaptive": True, "disabled": False}.get(kind if isinstance(kind, str) else ""),
        thinking,
        think,
        member(reasoning, "enabled"),
        member(template, "enable_thinking"),
        member(template, "thinking"),
        _first(readers, "enable_thinking"),
        False if effort in _NO_EFFORT else None,
    )
    is_on = next((value for value in switches if isinstance(value, bool)), None)
    if is_on is False or budget == 0:
        yield "thinking off"
    elif budget is not None and budget > 0:
        yield f"thinking {budget}"
    elif is_on or budget is not None:
        yield "thinking on"
    verbosity = _first(readers, "verbosity") or member(_first(readers, "text"), "verbosity")
    if isinstance(verbosity, str) and _WORD.fullmatch(verbosity):
        yield f"verbosity {verbosity.lower()}"


def _format(readers: Sequence[Read]) -> Iterator[str]:
    """The constraints of the output: the first of a schema, JSON, choices, a regular expression or a grammar."""
    values = [
        _first(readers, "response_format"),
        member(_first(readers, "text"), "format"),
        _first(readers, "format"),
        _first(readers, "structured_outputs"),
        _first(readers, "output_format"),
        member(_first(readers, "output_config"), "format"),
        {
            name: value
            for name in (*_SCHEMAS, *_CONSTRAINTS, "guided_choice")
            if (value := _first(readers, name)) is not None
        },
    ]
    for value in filter(None, values):
        for name in ("choice", "guided_choice"):
            if is_list(choices := member(value, name)):
                yield f"size {size_of(choice_tokens(choices := [*choices]))}"
                yield f"choice {len(choices)}"
                return
        for name, tag in _CONSTRAINTS.items():
            if (pattern := member(value, name)) is not None:
                if tag == "regex" and isinstance(pattern, str):
                    yield f"size {size_of(regex_tokens(pattern))}"
                yield tag
                return
        schemas = (value if is_schema(value) else None, *(member(value, name) for name in _SCHEMAS))
        kind = value if isinstance(value, str) else member(value, "type")
        schema = next((schema for schema in schemas if schema is not None), None)
        if schema is not None or (isinstance(kind, str) and "json" in kind):
            schema = _read_schema(schema)
            if tokens := schema_tokens(schema):
                yield f"size {size_of(tokens)}"
            names = ", ".join(_fields(schema))
            yield f"json {names}" if names else "json"
            return
    mime_type = _first(readers, "responseMimeType", "response_mime_type")
    if isinstance(mime_type, str) and "json" in mime_type:
        yield "json"


def _read_schema(schema: object) -> object:
    """A JSON schema, which may be a text or inside of an object with its name."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return None
    inner = member(schema, "schema")
    return schema if inner is None else inner


def _fields(schema: object) -> list[str]:
    """Names of the fields of a JSON schema."""
    properties = member(schema, "properties")
    return (
        [str(name)[:_MAX_CHARS] for name in properties][:_MAX_NAMES]
        if isinstance(properties, Mapping)
        else []
    )


def _stop(readers: Sequence[Read]) -> Iterator[str]:
    stop = _first(readers, "stop", "stop_sequences", "stopSequences")
    texts = [stop] if isinstance(stop, str) else [*stop] if is_list(stop) else []
    texts = [
        json.dumps(text[:_MAX_CHARS], ensure_ascii=False) for text in texts if isinstance(text, str) and text
    ]
    if texts:
        yield f"stop {', '.join(texts[:_MAX_NAMES])}"


def _tools(readers: Sequence[Read]) -> Iterator[str]:
    tools = _first(readers, "tools", "functions")
    choice = _first(readers, "tool_choice", "function_call")
    kind = choice if isinstance(choice, str) else member(choice, "type")
    if not is_list(tools) or kind == "none":
        return
    described = [text for tool in [*tools][:_MAX_NAMES] for text in _described(tool)]
    if not described:
        return
    chosen = member(choice, "name") or member(member(choice, "function"), "name")
    if isinstance(chosen, str):
        yield f"tool {chosen[:_MAX_CHARS]}"
    elif kind in ("required", "any"):
        yield "tool required"
    yield f"tools {'; '.join(described)}"


def _described(tool: object) -> Iterator[str]:
    """Name and first words of the description of a tool, or of each of the functions of a tool of Gemini."""
    declarations = member(tool, "functionDeclarations")
    for each in [*declarations][:_MAX_NAMES] if is_list(declarations) else [tool]:
        function = each if member(each, "function") is None else member(each, "function")
        name, description = member(function, "name"), member(function, "description")
        if not isinstance(name, str):
            name = member(each, "type")  # tools of the server, such as web_search
        if not isinstance(name, str):
            continue
        words = description[:400].split()[:_MAX_WORDS] if isinstance(description, str) else []
        yield f"{name[:_MAX_CHARS]}: {' '.join(words)}" if words else name[:_MAX_CHARS]
