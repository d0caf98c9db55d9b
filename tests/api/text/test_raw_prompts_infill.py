"""Prompts for filling in text: the marks of each family, in its order, around the texts' own tokens."""

from __future__ import annotations

import pytest

from mlxrun.api.text.raw_prompts import (
    FORMATS,
    InfillFormat,
    build_infill_ids,
    find_infill_end_ids,
    find_infill_format,
)
from tests.helpers.infill_models import make_infill_model
from tests.helpers.tokenizers import FakeModelInfo, metaspace_tokenizer

PREFIX, SUFFIX = "def f(x):\n    return", "\n\nprint(f(3))"


@pytest.mark.parametrize("family", FORMATS)
def test_the_prompt_of_each_family(family: str) -> None:
    """As its model card writes it, with the token in front of it that every raw text gets."""
    found = FORMATS[family]
    model = make_infill_model(found)
    assert find_infill_format(model) is found
    prefix, suffix, middle = found.marks
    parts = [f"{prefix}{PREFIX}", f"{suffix}{SUFFIX}"]
    text = "".join(parts[::-1] if found.suffix_first else parts) + middle
    ids = build_infill_ids(model, found, PREFIX, SUFFIX)
    assert ids == tuple(model.tokenizer(text)["input_ids"])
    assert model.tokenizer.decode(ids[:1]) == "<|begin|>"


def test_models_without_such_tokens_have_no_format() -> None:
    """Two marks of three are not enough."""
    assert find_infill_format(FakeModelInfo()) is None
    assert find_infill_end_ids(FakeModelInfo()) == frozenset()
    half = InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<fim_middle>")
    assert find_infill_format(make_infill_model(half)) is None


def test_a_suffix_gets_no_implicit_space() -> None:
    """CodeLlama's tokenizer puts a space in front of a text: right for the prefix, wrong for the suffix."""
    found = FORMATS["codellama"]
    model = make_infill_model(found, metaspace_tokenizer)
    ids = build_infill_ids(model, found, "hello", "world a")
    begin, hole, middle = (model.tokenizer.convert_tokens_to_ids(mark) for mark in found.marks)
    assert (ids[0], ids[-1]) == (begin, middle)
    at = ids.index(hole)
    assert ids[1:at] == tuple(model.tokenizer("hello", add_special_tokens=False)["input_ids"])
    deltas = model.tokenizer.convert_ids_to_tokens(list(ids[at + 1 : -1]))
    assert not deltas[0].startswith("\u2581") and deltas[-1].endswith("a")
    assert ids[at + 1 : -1] != tuple(model.tokenizer("world a", add_special_tokens=False)["input_ids"])
