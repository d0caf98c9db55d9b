"""The table of errors in the docstring of mlxrun/core/errors.py is what the classes say."""

from __future__ import annotations

import re

import pytest

from mlxrun.core import errors
from mlxrun.core.errors import MlxrunError, is_out_of_memory

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, MlxrunError)
}
ROWS = {
    match["name"]: match
    for match in re.finditer(
        r"^[ |`-]*(?P<name>[A-Z]\w+) +(?:exit (?P<exit>\d))?(?: +http (?P<http>\d+))?",
        errors.__doc__ or "",
        re.M,
    )
    if match["name"] in CLASSES
}


def test_every_class_is_in_the_table() -> None:
    assert ROWS.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_the_table_has_the_right_numbers(name: str) -> None:
    row, found = ROWS[name], CLASSES[name]
    if row["exit"]:
        assert found.exit_code == int(row["exit"])
    if row["http"]:
        assert found.http_status == int(row["http"])


def test_codes_are_identifiers_for_programs() -> None:
    assert all(re.fullmatch(r"[a-z_]+", found.code) for found in CLASSES.values())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (0000000e)"),
        RuntimeError("[malloc] Unable to allocate 3 bytes"),
    ],
)
def test_a_shortage_of_memory_is_known_by_its_text(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes (3) and (4) cannot be broadcast"))
