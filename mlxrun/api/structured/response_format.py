"""The grammar of an answer: `response_format`, `structured_outputs`, forced tool calls and strict tools.

Compiling a grammar is slow: call `build_response_grammar` on a worker thread. A RequestError names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.structured.grammar import (
    CallPattern,
    CompiledGrammar,
    GrammarKind,
    compile_calls,
    compile_grammar,
)
from mlxrun.api.structured.matcher import ReasoningBounds
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import may_reason
from mlxrun.core.field_errors import check_keys, check_type, get_required, quote, reject, reject_unsupported

TYPES = ("text", "json_object", "json_schema")
# vLLM's fields, in their newer and their older spelling, which other servers of open models have too.
STRUCTURED_OUTPUTS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
}
GUIDED = {f"guided_{name}": name for name in STRUCTURED_OUTPUTS if name != "json_object"}

LARGE_GRAMMAR = 1_000  # JSON values and hundreds of characters: 0.2 s

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the answer text must match. `param`: the field that says so."""

    kind: GrammarKind
    value: Any
    param: str
    strict: bool = True


def build_response_grammar(
    given: Mapping[str, Any],
    tools: Tools,
    prompt: str,
    model: ModelInfo,
    formats: ModelFormats,
    arguments: Mapping[str, Any],
) -> CompiledGrammar | None:
    """Build the grammar of a checked body; None if the answer is free. `tools`: the tools that may be called.
    `prompt`, and the `arguments` that rendered it, tell whether reasoning may come first."""
    text, forced = _read_response_format(given), _find_forced_tools(given, tools)
    if forced:
        if text is not None:
            reject(text.param, "not together with a tool_choice that forces a call")
        grammar = _compile_forced(given, tools, forced, model, formats)
    elif text is not None:
        grammar = _compile_text(text, tools, model, formats)
    elif any(_get_function(tool).get("strict") for tool in tools):
        grammar = _compile_strict(tools, model, formats)
    else:
        return None
    if given.get("ignore_eos") and not given.get("stop_token_ids"):
        reject("ignore_eos", "structured output has to end; give stop_token_ids")
    tags = formats.get_reasoning_tags(prompt)
    if tags is None or (tags[0] and not may_reason(model, arguments)):
        return grammar
    opener, closer = tags
    ids = model.tokenizer(opener, add_special_tokens=False)["input_ids"] if opener else ()
    return grammar.begin_after(ReasoningBounds(closer, tuple(ids)))


def is_large_grammar(given: Mapping[str, Any], tools: Tools) -> bool:
    """Tell whether `build_response_grammar` may take long for a checked body. Fast."""
    stack = [given.get(field) for field in ("response_format", "structured_outputs", *GUIDED)]
    is_free = all(each is None for each in stack) and given.get("tool_choice", "auto") in ("auto", "none")
    if not is_free or any(_get_function(tool).get("strict") for tool in tools):
        stack += [_get_function(tool).get("parameters") for tool in tools]
    size = 0
    while stack and size <= LARGE_GRAMMAR:
        each = stack.pop()
        size += 1 + (len(each) // 100 if isinstance(each, str) else 0)
        if isinstance(each, (dict, list)):
            stack += each.values() if isinstance(each, dict) else each
    return size > LARGE_GRAMMAR


def reject_structured_output(given: Mapping[str, Any], tools: Tools, reason: str) -> None:
    """Raise RequestError with this reason if a body asks for structured output."""
    text = _read_response_format(given)
    if text is not None:
        reject(text.param, reason)
    if _find_forced_tools(given, tools):
        reject("tool_choice", f"a forced call is {reason}")
    for i, tool in enumerate(tools):
        if _get_function(tool).get("strict"):
            reject(f"tools[{i}].function.strict", reason)


def _read_response_format(given: Mapping[str, Any]) -> ResponseFormat | None:
    """Read the fields of a body that say what the answer text must match. Raises RequestError if two do."""
    found = [_read_openai_field(given)]
    inner = given.get("structured_outputs")
    if inner is not None:
        check_keys(check_type(inner, dict, "structured_outputs"), STRUCTURED_OUTPUTS, "structured_outputs")
        found += [
            _read_vllm_field(name, value, f"structured_outputs.{name}") for name, value in inner.items()
        ]
    found += [_read_vllm_field(name, given[field], field) for field, name in GUIDED.items() if field in given]
    formats = [one for one in found if one is not None]
    if len(formats) > 1:
        reject(formats[1].param, f"not together with {formats[0].param}: an answer has one response format")
    return formats[0] if formats else None


def _read_openai_field(given: Mapping[str, Any]) -> ResponseFormat | None:
    value = given.get("response_format")
    if value is None:
        return None
    kind = value["type"]
    if kind not in TYPES:
        reject("response_format.type", f"{quote(kind)} is not one of {', '.join(TYPES)}")
    check_keys(value, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json_object", None, "response_format")
    inner = get_required(value, "json_schema", dict, "response_format")
    check_keys(inner, ("name", "description", "schema", "strict"), "response_format.json_schema")
    strict = inner.get("strict")
    if strict is not None:
        check_type(strict, bool, "response_format.json_schema.strict")
    schema = inner.get("schema")
    param = "response_format.json_schema.schema"
    if schema is None:
        reject(param, "missing", code="missing_field")
    # OpenAI follows a schema that is not strict at best effort; here it holds too, but unknown keywords pass.
    return ResponseFormat("json_schema", schema, param, strict=bool(strict))


def _read_vllm_field(name: str, value: Any, param: str) -> ResponseFormat | None:
    if value is None or (name == "json_object" and value is False):
        return None
    if name == "json_object":
        check_type(value, bool, param)
    return ResponseFormat(STRUCTURED_OUTPUTS[name], value, param, strict=False)


def _find_forced_tools(given: Mapping[str, Any], tools: Tools) -> Sequence[int]:
    """Return the indices of the tools of which one must be called; empty if none must."""
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        return [_find_named_tool(choice, tools)]
    if check_type(choice, str, "tool_choice") not in ("auto", "none", "required"):
        reject("tool_choice", f"{quote(choice)} is not one of auto, none, required")
    if choice == "required" and not tools:
        reject("tool_choice", "'required' needs tools")
    return range(len(tools)) if choice == "required" else ()


def _find_named_tool(choice: dict[str, Any], tools: Tools) -> int:
    if choice.get("type") != "function":
        reject_unsupported("tool_choice.type", "only 'function' is supported")
    check_keys(choice, ("type", "function"), "tool_choice")
    function = check_type(choice.get("function"), dict, "tool_choice.function")
    check_keys(function, ("name",), "tool_choice.function")
    name = check_type(function.get("name"), str, "tool_choice.function.name")
    for i, tool in enumerate(tools):
        if _get_function(tool)["name"] == name:
            return i
    reject("tool_choice.function.name", f"{quote(name)} is not the name of a tool in tools")


def _compile_forced(
    given: Mapping[str, Any], tools: Tools, forced: Sequence[int], model: ModelInfo, formats: ModelFormats
) -> CompiledGrammar:
    """Compile a call of one of the `forced` tools, or several calls where they are allowed."""
    patterns = _make_patterns(tools, forced, formats, "tool_choice")
    several = given.get("tool_choice") == "required" and given.get("parallel_tool_calls") is not False
    separator = formats.call_separator if several else None
    strict = _are_strict([tools[i] for i in forced])
    return compile_calls(patterns, model, param="tools", separator=separator, strict=strict)


def _compile_text(
    text: ResponseFormat, tools: Tools, model: ModelInfo, formats: ModelFormats
) -> CompiledGrammar:
    """Compile answer text of this format; where tools are offered, a call may take its place."""
    if not tools:
        return compile_grammar(text.kind, text.value, model, param=text.param, strict=text.strict)
    if text.kind not in ("json_object", "json_schema"):
        reject(text.param, "not together with tools that may be called; set tool_choice: none")
    schema = {"type": "object"} if text.kind == "json_object" else text.value
    calls = _make_patterns(tools, range(len(tools)), formats, text.param)
    patterns = [*calls, CallPattern("", schema, "", text.param)]
    return compile_calls(patterns, model, param=text.param, strict=text.strict)


def _compile_strict(tools: Tools, model: ModelInfo, formats: ModelFormats) -> CompiledGrammar:
    """Compile free text in which calls, if there are any, match the schemas of their tools."""
    first = next(i for i, tool in enumerate(tools) if _get_function(tool).get("strict"))
    param = f"tools[{first}].function.strict"
    patterns, opener = _make_patterns(tools, range(len(tools)), formats, param), formats.call_opener
    if not opener:
        reject_unsupported(param, "a schema of this model's calls is enforced only if a call is forced")
    return compile_calls(patterns, model, param="tools", opener=opener, strict=_are_strict(tools))


def _make_patterns(
    tools: Tools, indices: Sequence[int], formats: ModelFormats, param: str
) -> list[CallPattern]:
    """Make the patterns of the tools at `indices`. `param`: the field because of which they are enforced."""
    patterns = []
    for i in indices:
        function = _get_function(tools[i])
        around = formats.get_call_prefix_suffix(function["name"])
        if around is None:
            reject_unsupported(param, "this model's format of tool calls is not JSON, and cannot be enforced")
        schema = function.get("parameters") or {"type": "object"}
        path = f"tools[{i}].function.parameters"
        patterns.append(CallPattern(around[0], {"type": "object", **schema}, around[1], path))
    return patterns


def _are_strict(tools: Tools) -> bool:
    return all(_get_function(tool).get("strict") for tool in tools)


def _get_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function
