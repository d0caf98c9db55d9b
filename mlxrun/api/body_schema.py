"""What checks request bodies: every field of an endpoint is honoured, harmless, or refused by name.

`Body.check` returns the fields that were given (null is not given); an unknown field is an error with a
suggestion. What needs more than a schema is checked where it is used. The fields themselves: openai_fields.py
and its like for the other surfaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from mlxrun.text.field_errors import UNKNOWN, bad, field_of, kind, need, quote, shorten, suggest, unsupported

Schema = dict[str, Any]


@dataclass(frozen=True)
class Body:
    """The body of one endpoint.

    `honoured`: JSON schema by field. `harmless`: accepted because the given values change nothing in the
    answer: schema of those values, and why. `refused`: known fields that are refused whatever they hold, and
    why. `elsewhere`: fields of other endpoints, by name, and the URL where they belong.
    """

    honoured: Mapping[str, Schema]
    harmless: Mapping[str, tuple[Schema, str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def validator(self) -> Draft202012Validator:
        return Draft202012Validator({"properties": dict(self.honoured)})

    @property
    def schema(self) -> Schema:
        """The whole body as one JSON schema, for documents."""
        harmless = {name: schema for name, (schema, _) in self.harmless.items()}
        return {
            "type": "object",
            "properties": {**self.honoured, **harmless},
            "additionalProperties": False,
        }

    def check(self, body: Any) -> dict[str, Any]:
        """The fields of a body that were given, each of the right type and range."""
        if not isinstance(body, dict):
            raise bad("body", f"expected an object, got {kind(body)}", code="invalid_type")
        given = {key: value for key, value in body.items() if value is not None}
        try:
            for key, value in given.items():
                self._known(key, value)
                _check_count(key, value, self.honoured.get(key, {}))
            _finite(given)
            errors = sorted(self.validator.iter_errors(given), key=lambda error: path(error.absolute_path))
        except RecursionError as exc:
            raise bad("body", "is nested too deeply") from exc
        if errors:
            raise explain(errors[0])
        return given

    def _known(self, key: str, value: Any) -> None:
        if key in self.honoured:
            return
        if key in self.refused:
            raise unsupported(key, self.refused[key])
        if key in self.harmless:
            schema, reason = self.harmless[key]
            if not Draft202012Validator(schema).is_valid(value):
                raise unsupported(key, f"only {_expected(schema)} is taken ({reason})")
            return
        if key in self.elsewhere:
            raise bad(key, f"belongs to {self.elsewhere[key]}", code=UNKNOWN)
        hint = suggest(key, [*self.honoured, *self.harmless])
        raise bad(shorten(key), f"unknown parameter{hint}", code=UNKNOWN)


def _check_count(name: str, value: Any, schema: Schema) -> None:
    """An entry costs some 40 us to check, and an error more, so entries are counted first."""
    if not isinstance(value, list | dict):
        return
    most = schema.get("maxItems" if isinstance(value, list) else "maxProperties")
    if most is not None and len(value) > most:
        raise bad(name, f"has {len(value)} entries; at most {most} are taken", code="invalid_value")


def _finite(given: dict[str, Any]) -> None:
    """NaN and infinities pass every range of a JSON schema."""
    biases = given.get("logit_bias")
    fields = {f"logit_bias.{key}": value for key, value in biases.items()} if isinstance(biases, dict) else {}
    for key, value in (given | fields).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise bad(key, "must be a finite number")


def explain(error: ValidationError) -> Exception:
    """The error of a request for what a schema found."""
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


def path(parts: Iterable[Any]) -> str:
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
        if field_of(tool, "type", str, where) != "function":
            raise unsupported(f"{where}.type", "only 'function' tools are taken")
        function = field_of(tool, "function", dict, where)
        if not field_of(function, "name", str, f"{where}.function"):
            raise bad(f"{where}.function.name", "is empty")
        for key, wanted in (("description", str), ("parameters", dict), ("strict", bool)):
            if function.get(key) is not None:
                need(function[key], wanted, f"{where}.function.{key}")
    return list(tools)
