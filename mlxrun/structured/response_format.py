"""What an answer is held to: `response_format`, `structured_outputs`, forced and strict tools; as a grammar.

`form_of` is slow (a grammar is compiled): call it on a worker thread. Errors name the field that asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.structured.grammar import CallFrame, CompiledGrammar, Kind, compile_calls, compile_grammar
from mlxrun.structured.matcher import ReasoningBounds
from mlxrun.text.field_errors import check_keys, check_type, quote, reject, reject_unsupported
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import may_reason

FORMATS = ("text", "json_object", "json_schema")
# vLLM's fields, in their newer and their older form, which servers of open models have taken over.
STRUCTURED: dict[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
}
GUIDED = {f"guided_{name}": name for name in STRUCTURED if name != "json_object"}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A form of the text; `param` is the field that asks for it."""

    kind: Kind
    value: Any
    param: str
    strict: bool = True


def form_of(
    given: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
    host: ModelInfo,
    formats: ModelFormats,
    arguments: Mapping[str, Any],
) -> CompiledGrammar | None:
    """The grammar of a checked body, None if anything may be said. `tools`: those that may be called;
    `prompt`: rendered, with the variables `arguments`, as both tell whether the answer may think first."""
    wanted, forced = wanted_of(given), forced_of(given, tools)
    if forced:
        if wanted is not None:
            reject(wanted.param, "not together with a tool_choice that forces a call")
        found = _forced(given, forced, host, formats)
    elif wanted is not None:
        found = _text(wanted, tools, host, formats)
    elif any(_function(tool).get("strict") for tool in tools):
        found = _offered(tools, host, formats)
    else:
        return None
    if given.get("ignore_eos") and not given.get("stop_token_ids"):
        reject("ignore_eos", "an answer that is held to a form has to end; give stop_token_ids")
    thought = formats.get_reasoning_tags(prompt)
    if thought is None or (thought[0] and not may_reason(host, arguments)):
        return found
    return found.after(_thought(thought, host))


def refuse_form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], reason: str) -> None:
    """The error for a body that asks for any form at all, which names the field that does."""
    wanted = wanted_of(given)
    if wanted is not None:
        reject(wanted.param, reason)
    if forced_of(given, tools):
        reject("tool_choice", f"a forced call is {reason}")
    for i, tool in enumerate(tools):
        if _function(tool).get("strict"):
            reject(f"tools[{i}].function.strict", reason)


def wanted_of(given: Mapping[str, Any]) -> ResponseFormat | None:
    """What the body's fields ask of the text; an error if two of them ask."""
    asks = [ask for ask in (_response_format(given), *_structured(given)) if ask is not None]
    if len(asks) > 1:
        reject(asks[1].param, f"not together with {asks[0].param}: an answer has one form")
    return asks[0] if asks else None


def _response_format(given: Mapping[str, Any]) -> ResponseFormat | None:
    asked = given.get("response_format")
    if asked is None:
        return None
    of = asked["type"]
    if of not in FORMATS:
        param = "response_format.type"
        reject(param, f"{quote(of)} is not one of {', '.join(FORMATS)}")
    check_keys(asked, ("type", "json_schema") if of == "json_schema" else ("type",), "response_format")
    if of == "text":
        return None
    if of == "json_object":
        return ResponseFormat("json_object", None, "response_format")
    inner = check_type(asked.get("json_schema"), dict, "response_format.json_schema")
    check_keys(inner, ("name", "description", "schema", "strict"), "response_format.json_schema")
    strict = inner.get("strict")
    if strict is not None:
        check_type(strict, bool, "response_format.json_schema.strict")
    schema = inner.get("schema")
    param = "response_format.json_schema.schema"
    if schema is None:
        reject(param, "missing", code="missing_field")
    # Not strict in OpenAI's words is best effort there; here the schema holds too, but unknown keywords pass.
    return ResponseFormat("json_schema", schema, param, strict=bool(strict))


def _structured(given: Mapping[str, Any]) -> list[ResponseFormat | None]:
    asks: list[ResponseFormat | None] = []
    inner = given.get("structured_outputs")
    if inner is not None:
        check_keys(check_type(inner, dict, "structured_outputs"), STRUCTURED, "structured_outputs")
        asks += [_ask(name, value, f"structured_outputs.{name}") for name, value in inner.items()]
    asks += [_ask(name, given[field], field) for field, name in GUIDED.items() if field in given]
    return asks


def _ask(name: str, value: Any, param: str) -> ResponseFormat | None:
    if value is None or (name == "json_object" and value is False):
        return None
    if name == "json_object":
        check_type(value, bool, param)
    return ResponseFormat(STRUCTURED[name], value, param, strict=False)


def forced_of(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools of which one must be called; empty if none must."""
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        return [_named(choice, tools)]
    if check_type(choice, str, "tool_choice") not in ("auto", "none", "required"):
        reject("tool_choice", f"{quote(choice)} is not one of auto, none, required")
    if choice == "required" and not tools:
        reject("tool_choice", "'required' needs tools")
    return list(tools) if choice == "required" else []


def _named(choice: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    check_keys(choice, ("type", "function"), "tool_choice")
    if choice.get("type") != "function":
        reject_unsupported("tool_choice.type", "only 'function' is taken")
    function = check_type(choice.get("function"), dict, "tool_choice.function")
    check_keys(function, ("name",), "tool_choice.function")
    name = check_type(function.get("name"), str, "tool_choice.function.name")
    for tool in tools:
        if _function(tool)["name"] == name:
            return tool
    reject("tool_choice.function.name", f"{quote(name)} is none of the tools")


def _forced(
    given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], host: ModelInfo, formats: ModelFormats
) -> CompiledGrammar:
    frames = _frames(tools, formats, "tool_choice")
    several = given.get("tool_choice") == "required" and given.get("parallel_tool_calls") is not False
    between = formats.call_separator if several else None
    return compile_calls(frames, host, param="tools", between=between, strict=_strict(tools))


def _text(
    wanted: ResponseFormat, tools: Sequence[Mapping[str, Any]], host: ModelInfo, formats: ModelFormats
) -> CompiledGrammar:
    """A text of that form; where tools are offered a call may come in its place."""
    if not tools:
        return compile_grammar(wanted.kind, wanted.value, host, param=wanted.param, strict=wanted.strict)
    if wanted.kind not in ("json_object", "json_schema"):
        reject(wanted.param, "not together with tools that may be called; set tool_choice: none")
    schema = {"type": "object"} if wanted.kind == "json_object" else wanted.value
    frames = [*_frames(tools, formats, wanted.param), CallFrame("", schema, "")]
    return compile_calls(frames, host, param=wanted.param, strict=wanted.strict)


def _offered(tools: Sequence[Mapping[str, Any]], host: ModelInfo, formats: ModelFormats) -> CompiledGrammar:
    """Free text in which calls, if there are any, are held to the schemas of tools that ask for it."""
    first = next(i for i, tool in enumerate(tools) if _function(tool).get("strict"))
    param = f"tools[{first}].function.strict"
    frames = _frames(tools, formats, param)
    if not formats.call_opener:
        reject_unsupported(param, "calls in this model's format are held to a schema only if one is forced")
    return compile_calls(frames, host, param="tools", opener=formats.call_opener, strict=_strict(tools))


def _frames(tools: Sequence[Mapping[str, Any]], formats: ModelFormats, param: str) -> list[CallFrame]:
    frames = []
    for tool in tools:
        function = _function(tool)
        around = formats.get_call_prefix_suffix(function["name"])
        if around is None:
            reject_unsupported(param, "calls in this model's format cannot be held to a form")
        schema = function.get("parameters") or {"type": "object"}
        frames.append(CallFrame(around[0], {"type": "object", **schema}, around[1]))
    return frames


def _strict(tools: Sequence[Mapping[str, Any]]) -> bool:
    return all(_function(tool).get("strict") for tool in tools)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function


def _thought(thought: tuple[str, str], host: ModelInfo) -> ReasoningBounds:
    opens, closes = thought
    ids = host.tokenizer(opens, add_special_tokens=False)["input_ids"] if opens else ()
    return ReasoningBounds(closes, tuple(ids))
