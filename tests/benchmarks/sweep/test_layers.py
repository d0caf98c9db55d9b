"""docs/models.md names the families whose layers are fused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.sweep import layers
from benchmarks.sweep.layers import find_all_layers, find_layers, render_layers

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.mark.parametrize(
    ("kind", "family", "found"),
    [
        ("text", "llama", "whole"),
        ("text", "qwen3_moe", "attention"),
        ("text", "gemma2", "none"),
        ("text", "lfm2", "none"),
        ("vision", "llava", "whole"),
    ],
)
def test_the_layers_of_a_family(kind: str, family: str, found: str) -> None:
    assert find_layers(kind, family) == found
    page = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    text = page[page.index(f"## {kind.capitalize()}") :].split(" ## ")[0]
    named = (
        re.search(rf"- {layers._WORDS[found]} \(\d+ families\): (.*?)( - |$)", text)
        if found in layers._WORDS
        else None
    )  # type: ignore[index]
    assert named is None or f"`{family}`" in named[1]
    assert (named is None) is (found == "none")


def test_the_lines() -> None:
    lines = list(render_layers({"b": "whole", "a": "whole", "c": "attention", "d": "none"}))
    assert lines[3] == "- whole layers (2 families): `a`, `b`" and lines[4].endswith("(1 families): `c`")
    assert list(render_layers({"d": "none"})) == []


def test_a_family_that_does_not_build_has_none() -> None:
    assert find_all_layers([("text", "no_such_family")]) == {"text": {"no_such_family": "none"}}
