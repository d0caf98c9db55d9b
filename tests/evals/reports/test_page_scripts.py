"""The page's functions that need no page, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

from mlxrun.evals.reports.page import build_script
from tests.helpers.report_jobs import HOSTILE

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node here")
TEXT = resources.files("mlxrun.evals.reports").joinpath("assets", "text.js")

COLUMNS = {
    "ids": ["a", "b", "c", "d", "e"],
    "groups": [0, 0, 1, 1, -1],
    "tasks": [0, 0, 0, 1, 1],
    "marks": ["cc", "cw", "f-", "pu", "w-"],
    "flags": ["00", "54", "00", "23", "00"],
}
ANY = {"state": "all", "group": -1, "task": -1, "run": -1}


def call(name: str, *calls: tuple[Any, ...]) -> list[Any]:
    """The value of a function of text.js for each tuple of arguments, in one process."""
    assert NODE is not None
    with resources.as_file(TEXT) as path:
        called = f"{json.dumps(calls)}.map(each => require({json.dumps(str(path))}).{name}(...each))"
        script = f"process.stdout.write(JSON.stringify({called}))"
        done = subprocess.run([NODE, "-e", script], capture_output=True, check=True, timeout=300)
        found: list[Any] = json.loads(done.stdout)
    return found


def test_the_script_is_one_program() -> None:
    assert NODE is not None
    subprocess.run([NODE, "--check", "-"], input=build_script().encode(), check=True, timeout=300)


SELECTIONS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1, 2, 3, 4]),
    ({"state": "wrong"}, [1, 3, 4]),
    ({"state": "wrong", "run": 0}, [3, 4]),
    ({"state": "failed"}, [2]),
    ({"state": "cut"}, [1, 3]),
    ({"state": "empty", "run": 0}, [3]),
    ({"state": "flip"}, [1]),
    ({"state": "flip", "run": 0}, [1]),
    ({"group": 1}, [2, 3]),
    ({"task": 1, "state": "wrong"}, [3, 4]),
    ({"run": 1}, [0, 1, 3]),
    ({"state": "no such state"}, [0, 1, 2, 3, 4]),
]


def test_rows_are_selected() -> None:
    found = call("selectRows", *((COLUMNS, ANY | change) for change, _ in SELECTIONS))
    for (change, rows), selected in zip(SELECTIONS, found, strict=True):
        assert selected == rows, change


def test_rows_are_sorted() -> None:
    values, rows = [3, None, 1, 3], [0, 1, 2, 3]
    assert call("sortRows", (rows, values, False), (rows, values, True)) == [
        [2, 0, 3, 1],
        [0, 3, 2, 1],  # lines without a value come last in both directions
    ]


def test_what_differs_between_two_texts() -> None:
    (changed, same, _, long) = call(
        "compareTexts",
        ("the red cat sat", "the cat sat down"),
        ("a", "a"),
        ("", "\U0001f600 x"),
        ("x " * 3000 + "a" + " y" * 3000, "z " * 3000 + "a" + " w" * 3000),
    )
    assert changed == [
        [["the ", False], ["red ", True], ["cat sat", False]],
        [["the cat sat", False], [" down", True]],
    ]
    assert same == [[["a", False]], [["a", False]]]
    for parts, text in zip(
        long, ("x " * 3000 + "a" + " y" * 3000, "z " * 3000 + "a" + " w" * 3000), strict=True
    ):
        assert "".join(part for part, _ in parts) == text


def test_invisible_characters_are_split_off() -> None:
    known, empty, *hostile = call("splitInvisible", ("a\u202eb",), ("",), *((text,) for text in HOSTILE))
    assert known == [["a", False], ["U+202E", True], ["b", False]] and empty == []
    for text, parts in zip(HOSTILE, hostile, strict=True):
        assert "".join(chr(int(part[2:], 16)) if is_mark else part for part, is_mark in parts) == text


def test_all_texts_of_a_row_are_searched() -> None:
    answer = {
        "answer": 0,
        "reasoning": "Hmm",
        "expected": {"City": "Oslo"},
        "choices": ["Second"],
        "note": "slow",
    }
    row = {"prompt": [["user", "What?", []]], "runs": [answer, None]}
    found, nothing = call("joinTexts", (row, ["Shared TEXT"]), ({"prompt": None, "runs": [None]}, []))
    for text in ("user", "what?", "shared text", "hmm", '"city":"oslo"', "second", "slow"):
        assert text in found
    assert nothing == ""


def test_numbers_and_seconds() -> None:
    assert call("formatNumber", (0,), (999,), (1234567,)) == ["0", "999", "1,234,567"]
    assert call("formatSeconds", (None,), (0.416,), (12.4,), (200,)) == ["", "0.42 s", "12 s", "3 min 20 s"]
