"""The limit of depth is exact, for arrays and objects, and does not depend on the caller."""

from __future__ import annotations

import json

import pytest

from mlxrun.core.limited_json import (
    MAX_DEPTH,
    STRICT,
    NestedTooDeeply,
    NotStrict,
    check_depth,
    is_nested_deeper,
    load_json,
)


def nest(levels: int, start: str = "[", end: str = "]") -> str:
    return start * levels + ("1" if start != "[" else "") + end * levels


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_the_limit_is_exact(start: str, end: str) -> None:
    step = start.count("[") + start.count("{")
    good = nest(MAX_DEPTH // step, start, end)
    assert load_json(good) == json.loads(good)
    with pytest.raises(NestedTooDeeply, match="nested too deeply: more than 100 levels"):
        load_json(f"[{good}]")


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 500, 930, 980, 100_000])
def test_every_depth_above_it_is_one_error(levels: int) -> None:
    for text in (nest(levels), nest(levels).encode(), nest(levels, '{"a":', "}")):
        with pytest.raises(NestedTooDeeply):
            load_json(text)


def test_other_mistakes_are_value_errors() -> None:
    for text in ("", "[", "9" * 10_000, b"\xff"):
        with pytest.raises(ValueError) as caught:
            load_json(text)
        assert not isinstance(caught.value, NestedTooDeeply)


def test_hooks_are_passed() -> None:
    assert load_json('{"a": 1.5}', parse_float=str) == {"a": "1.5"}


def test_levels_are_counted() -> None:
    assert [is_nested_deeper(json.loads(text), 1) for text in ("1", "[]", "[1]", "[[]]", '{"a": {}}')] == [
        *(False, False, False),
        *(True, True),
    ]
    assert is_nested_deeper([], 0) and not is_nested_deeper(1, 0)
    check_depth([[1], {"a": [2]}])


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[1e400]", "the number 1e400 is too large"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice in one object"),
    ],
)
def test_what_only_python_reads_is_not_strict(text: str, message: str) -> None:
    with pytest.raises(NotStrict, match=f"^{message}$"):
        load_json(text, **STRICT)
