"""Any body at all is taken or refused, as the documented schemas say: A51."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mlxrun.api.anthropic import fields
from mlxrun.api.anthropic.fields import BODY, COUNT_BODY
from mlxrun.api.anthropic.openapi_schema import build_schema
from mlxrun.api.anthropic.response import build_error
from mlxrun.errors import RequestError
from tests.api.anthropic.test_fields import REFUSED
from tests.api.anthropic.test_request import EYES, SAME, TOOL_HOST, body, claude_code, make

# -- schemas, and any body at all -----------------------------------------------------------------------


def test_documented_schemas_take_what_is_taken() -> None:
    """/openapi.json and the checks agree on the bodies above, where their shape is right or wrong."""
    schema, counting = build_schema(BODY), build_schema(COUNT_BODY)
    for made in (schema, counting):
        Draft202012Validator.check_schema(made)
    whole = Draft202012Validator(schema)
    for _, ours, _ in SAME:
        assert whole.is_valid(ours), ours
    assert whole.is_valid(claude_code("1"))
    assert not Draft202012Validator(counting).is_valid(body())
    shapes = [given for given, _, words in REFUSED if "Extra inputs" in words or "Field required" in words]
    assert [given for given in shapes if whole.is_valid(given) and "task_budget" not in str(given)] == []


LEAF = (
    st.none() | st.booleans() | st.integers(-3, 2000) | st.floats() | st.text(max_size=6)
    | st.sampled_from(["text", "image", "tool_use", "tool_result", "user", "assistant", "system", "base64"])
)  # fmt: skip
KEYS = st.sampled_from(
    [
        *("type", "text", "content", "role", "source", "data", "media_type", "url", "id", "name", "input"),
        *(
            "tool_use_id",
            "is_error",
            "thinking",
            "signature",
            "cache_control",
            "citations",
            "edits",
            "effort",
        ),
    ]
)
VALUE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
FIELDS = st.sampled_from([*BODY.honoured, *BODY.harmless, *BODY.refused, "foo"])
SEEDS = [ours for _, ours, _ in SAME] + [claude_code("1")]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += [(value, key), *nodes(item)]
    return found


@settings(max_examples=150)
@given(st.data())
def test_any_body_is_taken_or_refused(data: st.DataObject) -> None:
    """A51: never anything but a RequestError that names a field; for bodies with a few things changed."""
    given_body = copy.deepcopy(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(nodes(given_body)))
        holder[key] = data.draw(VALUE)
        given_body |= data.draw(st.dictionaries(FIELDS, VALUE, max_size=1))
    host = data.draw(st.sampled_from([TOOL_HOST, EYES]))
    try:
        assert make(given_body, host).prepared.requests
    except RequestError as error:
        assert error.http_status in (400, 404)
        assert build_error(error, "r")["error"]["message"]


CONSTANTS = {
    name: getattr(fields, name)
    for name in ("STRING", "_NAME", "_TEXTS", "_LIST", "OBJECT", "BOOL", "_EFFORT")
}


@pytest.mark.parametrize("name", CONSTANTS)
@given(value=VALUE | st.text(min_size=250, max_size=260))
def test_the_short_way_says_what_the_schema_says(name: str, value: Any) -> None:
    """What is let through without jsonschema would have passed it."""
    schema = CONSTANTS[name]
    valid = Draft202012Validator(schema).is_valid(value)
    assert valid or not fields._is_valid(value, schema)
