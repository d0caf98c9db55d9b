"""Byte sizes as people write them (core/byte_sizes.py)."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.config.schema import build_schema
from mlxrun.core.byte_sizes import format_bytes, format_rounded, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4 GiB", 4 * 2**30),
        ("512mib", 512 * 2**20),
        ("1.5kB", 1500),
        ("7B", 7),
        ("2TiB", 2 * 2**40),
    ],
)
def test_byte_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    jsonschema.validate({"media": {"max_bytes": text}}, build_schema())


@pytest.mark.parametrize("text", ["4", "GB", "-1GB", "4 gigs", "4GBs", "", "1e3B"])
def test_what_is_no_byte_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a byte size"):
        parse_bytes(text)
    assert not jsonschema.Draft202012Validator(build_schema()).is_valid({"media": {"max_bytes": text}})


@given(st.integers(0, 2**60))
def test_byte_sizes_are_written_exactly(size: int) -> None:
    text = format_bytes(size)
    assert (int(text) if text.isdigit() else parse_bytes(text)) == size


def test_sizes_for_people() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 1_540_000: "1.5 MB", 16_400_000_000: "16.4 GB"}
    assert {size: format_rounded(size) for size in sizes} == sizes
