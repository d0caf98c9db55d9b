"""The documented schemas agree with the checks."""

from __future__ import annotations

from jsonschema import Draft202012Validator

from mlxrun.api.anthropic.fields import BODY, COUNT_BODY, build_schema
from mlxrun.api.anthropic.typed_tools import TYPED_SCHEMA
from tests.api.anthropic.test_fields import REFUSED
from tests.helpers.anthropic_api import body
from tests.helpers.anthropic_bodies import SAME, claude_code


def test_documented_schemas_take_what_is_taken() -> None:
    """/openapi.json and the checks agree on the bodies above, where their shape is right or wrong."""
    schema, counting = build_schema(BODY, TYPED_SCHEMA), build_schema(COUNT_BODY, TYPED_SCHEMA)
    for made in (schema, counting):
        Draft202012Validator.check_schema(made)
    whole = Draft202012Validator(schema)
    for _, ours, _ in SAME:
        assert whole.is_valid(ours), ours
    assert whole.is_valid(claude_code("1"))
    assert not Draft202012Validator(counting).is_valid(body())
    shapes = [given for given, _, words in REFUSED if "Extra inputs" in words or "Field required" in words]
    assert [given for given in shapes if whole.is_valid(given) and "task_budget" not in str(given)] == []
