"""Errors about fields name the field and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import (
    UNKNOWN,
    UNSUPPORTED,
    check_keys,
    check_type,
    get_json_type,
    get_required,
    iterate_strings,
    quote,
    reject_choice,
    reject_unsupported,
    shorten,
    suggest,
)


def catch(function: Any, *arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        function(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "null"),
        (True, "boolean"),
        (1, "integer"),
        (1.0, "number"),
        ("", "string"),
        ([], "array"),
        ({}, "object"),
    ],
)
def test_types_have_the_names_of_json(value: Any, name: str) -> None:
    assert get_json_type(value) == name
    assert name in str(catch(check_type, value, bytes if value is None else type(None), "a")) or value is None


def test_a_boolean_is_no_integer() -> None:
    error = catch(check_type, True, int, "a.b")
    assert (str(error), error.param, error.code) == (
        "a.b: expected integer, got boolean",
        "a.b",
        "invalid_type",
    )
    assert check_type(3, int, "a") == 3


def test_null_is_missing() -> None:
    for value in ({}, {"x": None}):
        error = catch(get_required, value, "x", str, "a")
        assert (str(error), error.code) == ("a.x: missing", "missing_field")
    assert get_required({"x": "y"}, "x", str, "a") == "y"


def test_unknown_and_unsupported_fields() -> None:
    error = catch(check_keys, {"a": 1, "contnt": 2}, ("a", "content"), "m[0]")
    assert (error.param, error.code) == ("m[0].contnt", UNKNOWN) and "did you mean 'content'" in str(error)
    check_keys({"a": 1}, ["a"], "m")
    error = catch(reject_unsupported, "a", "no reason")
    assert (str(error), error.code) == ("a: not supported: no reason", UNSUPPORTED)
    error = catch(reject_choice, "a", "atuo", ("auto", "none"))
    assert str(error) == "a: 'atuo' is not one of auto, none (did you mean 'auto'?)"
    assert "object is not one of auto" in str(catch(reject_choice, "a", {}, ["auto"]))


def test_errors_about_large_values_stay_readable() -> None:
    assert shorten("x" * 160) == "x" * 160
    assert len(shorten("x" * 10_000)) <= 160 and "(10000)" in shorten("x" * 10_000)
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert quote(deep) == "array" and len(quote("x" * 10_000)) < 180
    assert suggest("x" * 10_000, ["y"]) == ""


def test_only_words_that_are_alike_are_suggested() -> None:
    assert suggest("max_token", ["max_tokens", "n"]) == " (did you mean 'max_tokens'?)"
    assert suggest("num_beams", ["num_retries", "n"]) == ""


def test_every_string_of_a_value_has_its_path() -> None:
    value = {"a": ["x", {"b": "y"}], "c": 1}
    found = list(iterate_strings(value, "v"))
    assert found == [("v", "a"), ("v.a[0]", "x"), ("v.a[1]", "b"), ("v.a[1].b", "y"), ("v", "c")]
