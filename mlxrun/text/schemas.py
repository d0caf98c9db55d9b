"""The shape of request bodies: every field of OpenAI's two endpoints is honoured, harmless, or refused by
name.

`check_body` returns the fields that were given (null is not given); an unknown field is an error with a
suggestion. Ranges are OpenAI's where it has the field. What needs more than a schema is checked where it is
used.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from jsonschema import Draft202012Validator, ValidationError

from mlxrun.text.problems import UNKNOWN, bad, kind, need, quote, shorten, suggest, unsupported

Kind = Literal["chat", "completion"]
Schema = dict[str, Any]

_BOOL: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_ANY: Schema = {}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_TOP: Schema = {"type": "integer", "minimum": 0, "maximum": 20}

# Honoured by both endpoints. The last seven are not OpenAI's.
_COMMON: dict[str, Schema] = {
    "model": _STRING,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "max_tokens": _COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stop": _ANY,
    "stream": _BOOL,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _BOOL},
        "additionalProperties": False,
    },
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 1024},
    "ignore_eos": _BOOL,
    "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "user": _STRING,
}
HONOURED: dict[Kind, dict[str, Schema]] = {
    "chat": _COMMON
    | {
        "messages": _ANY,
        "tools": {"type": "array", "maxItems": 1024},
        "tool_choice": _ANY,
        "max_completion_tokens": _COUNT,
        "logprobs": _BOOL,
        "top_logprobs": _TOP,
        "reasoning_effort": _STRING,
        "chat_template_kwargs": _OBJECT,
    },
    "completion": _COMMON | {"prompt": _ANY, "echo": _BOOL, "logprobs": _TOP},
}

# Accepted because the given values change nothing in the answer: values, and why.
HARMLESS: dict[Kind, dict[str, tuple[Schema, str]]] = {
    "chat": {
        "metadata": (_OBJECT, "labels for a dashboard"),
        "safety_identifier": (_STRING, "names the end user"),
        "prompt_cache_key": (_STRING, "a hint; prefixes are found by their tokens"),
        "store": ({"const": False}, "nothing is stored"),
        "service_tier": ({"enum": ["auto", "default"]}, "there is one tier"),
        "modalities": ({"const": ["text"]}, "answers are text"),
        "response_format": ({"const": {"type": "text"}}, "answers are text"),
        "parallel_tool_calls": ({"const": True}, "the model decides how many calls it makes"),
    },
    "completion": {"best_of": ({"const": 1}, "one answer is the best of one")},
}

# Known fields that are refused whatever they hold, and why.
REFUSED: dict[Kind, dict[str, str]] = {
    "chat": {
        "audio": "answers are text",
        "function_call": "deprecated; use tool_choice",
        "functions": "deprecated; use tools",
        "moderation": "there is no moderation model",
        "prediction": "predicted outputs",
        "prompt_cache_retention": "how long prefixes are kept is a setting of the config",
        "verbosity": "say in the prompt how long the answer should be",
        "web_search_options": "there is no web search",
    },
    "completion": {"suffix": "text is only continued at its end"},
}


def check_body(of: Kind, body: Any) -> dict[str, Any]:
    """The fields of a body that were given, each of the right type and range."""
    if not isinstance(body, dict):
        raise bad("body", f"expected an object, got {kind(body)}", code="invalid_type")
    given = {key: value for key, value in body.items() if value is not None}
    try:
        for key, value in given.items():
            _known(of, key, value)
        _finite(given)
        errors = sorted(_VALIDATORS[of].iter_errors(given), key=lambda error: path(error.absolute_path))
    except RecursionError as exc:
        raise bad("body", "is nested too deeply") from exc
    if errors:
        raise _explain(errors[0])
    return given


def _known(of: Kind, key: str, value: Any) -> None:
    if key in HONOURED[of]:
        return
    if key in REFUSED[of]:
        raise unsupported(key, REFUSED[of][key])
    if key in HARMLESS[of]:
        schema, reason = HARMLESS[of][key]
        if not Draft202012Validator(schema).is_valid(value):
            raise unsupported(key, f"only {_expected(schema)} is taken ({reason})")
        return
    for other, url in (("chat", "/v1/chat/completions"), ("completion", "/v1/completions")):
        if key in HONOURED[other]:  # type: ignore[index]
            raise bad(key, f"belongs to {url}", code=UNKNOWN)
    hint = suggest(key, [*HONOURED[of], *HARMLESS[of]])
    raise bad(shorten(key), f"unknown parameter{hint}", code=UNKNOWN)


def _finite(given: dict[str, Any]) -> None:
    """NaN and infinities pass every range of a JSON schema."""
    biases = given.get("logit_bias")
    fields = {f"logit_bias.{key}": value for key, value in biases.items()} if isinstance(biases, dict) else {}
    for key, value in (given | fields).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise bad(key, "must be a finite number")


def _explain(error: ValidationError) -> Exception:
    param = path(error.absolute_path)
    if error.validator == "type":
        return bad(
            param, f"expected {error.validator_value}, got {kind(error.instance)}", code="invalid_type"
        )
    if "propertyNames" in error.absolute_schema_path:
        return bad(param, f"{quote(error.instance)} is not a token id, such as '1234'", code="invalid_value")
    return bad(param, shorten(error.message), code="invalid_value")


def _expected(schema: Schema) -> str:
    if "const" in schema:
        return repr(schema["const"])
    return " or ".join(map(repr, schema["enum"])) if "enum" in schema else f"{schema['type']}"


def path(parts: Any) -> str:
    """`a.b[3]` of jsonschema's list of keys and indices."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Function tools as a template takes them."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        need(tool, dict, where)
        if tool.get("type") != "function":
            raise unsupported(f"{where}.type", "only 'function' tools are taken")
        function = need(tool.get("function"), dict, f"{where}.function")
        if not need(function.get("name"), str, f"{where}.function.name"):
            raise bad(f"{where}.function.name", "is empty")
        for key, wanted in (("description", str), ("parameters", dict), ("strict", bool)):
            if function.get(key) is not None:
                need(function[key], wanted, f"{where}.function.{key}")
        if function.get("strict"):
            raise unsupported(f"{where}.function.strict", "calls are not held to the schema; leave it out")
    return list(tools)


_VALIDATORS: dict[str, Draft202012Validator] = {
    of: Draft202012Validator({"properties": fields}) for of, fields in HONOURED.items()
}
