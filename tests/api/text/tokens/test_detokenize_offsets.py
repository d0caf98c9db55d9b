"""Where tokens begin in a text: exact to the character, for texts and for token ids."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.text.tokens import detokenize
from mlxrun.api.text.tokens.detokenize import find_id_offsets, find_text_offsets, get_token_bytes
from tests.helpers.tokenizers import FakeModelInfo, byte_tokenizer, ids_of, metaspace_tokenizer

BYTES, WORDS = FakeModelInfo(), FakeModelInfo(tokenizer=metaspace_tokenizer())
TEXTS = st.text(alphabet="hello wo\n.\u4f60\U0001f600\u0159", max_size=20)


def tokenize(model: Any, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer(text, add_special_tokens=True)["input_ids"])


def count_characters(ids: tuple[int, ...]) -> int:
    """The characters that byte-level tokens complete, special tokens not counted."""
    table = byte_tokenizer()
    data = table.decode(list(ids), skip_special_tokens=True)
    return len(data.rstrip("\ufffd"))


@given(TEXTS)
def test_a_token_begins_where_those_before_it_end(text: str) -> None:
    ids = tokenize(BYTES, text)
    wanted = tuple(count_characters(ids[:at]) for at in range(len(ids)))
    assert find_text_offsets(BYTES, text, ids) == wanted


@given(TEXTS, st.sampled_from([BYTES, WORDS]))
def test_offsets_never_go_back_and_lie_in_the_text(text: str, model: Any) -> None:
    ids = tokenize(model, text)
    decoded = model.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for found, length in (
        (find_text_offsets(model, text, ids), len(text)),
        (find_id_offsets(model, decoded, ids), len(decoded)),
    ):
        assert len(found) == len(ids) and list(found) == sorted(found)
        assert all(0 <= offset <= length for offset in found)


@given(st.lists(st.integers(0, len(byte_tokenizer()) - 1), max_size=12), TEXTS)
def test_counted_characters_are_those_that_decoding_adds(ids: list[int], text: str) -> None:
    """Of any tokens, whether or not they are whole characters."""
    for each in (tuple(ids), tokenize(BYTES, text), (*tokenize(BYTES, text), *ids)):
        decoded = BYTES.tokenizer.decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        with patch.object(detokenize, "_count_characters", return_value=None):
            wanted = find_id_offsets(BYTES, decoded, each)
        assert find_id_offsets(BYTES, decoded, each) == wanted


def test_characters_are_counted_only_where_bytes_are_the_text() -> None:
    count = detokenize._count_characters
    to_bytes, whole, half = (
        get_token_bytes(byte_tokenizer().backend_tokenizer),
        ids_of("a\u4f60b"),
        ids_of("\u4f60"),
    )
    assert count(to_bytes, "a\u4f60b", whole) == (0, 1, 1, 1, 2)
    assert count(to_bytes, " a\u4f60b", whole) is None
    assert count(to_bytes, "\ufffd", half[:-1]) is None and count(to_bytes, "", half[:-1]) is None


def test_tokens_of_special_texts() -> None:
    """What the tokenizer adds has no width in a text; in decoded ids it is text like any other."""
    ids = tokenize(BYTES, "a<think>\u4f60b")
    assert len(ids) == 7 and find_text_offsets(BYTES, "a<think>\u4f60b", ids) == (0, 0, 1, 8, 8, 8, 9)
    decoded = "<|begin|>a<think>\u4f60b"
    assert find_id_offsets(BYTES, decoded, ids) == (0, 9, 10, 17, 17, 17, 18)
    half = ids_of("a\u4f60")[:-1]
    assert find_id_offsets(BYTES, byte_tokenizer().decode(list(half)), half) == (0, 1, 1)


@pytest.mark.parametrize("text", ["hello world", " hello", "hello  world. \u4f60 lo"])
def test_a_space_belongs_to_the_word_behind_it(text: str) -> None:
    """Also where the tokenizer's own offsets leave it out."""
    ids = tokenize(WORDS, text)
    found = find_text_offsets(WORDS, text, ids)
    parts = [text[a:b] for a, b in zip(found, [*found[1:], len(text)], strict=True)]
    assert "".join(parts) == text and found[0] == 0


def test_offsets_that_leave_out_spaces_are_mended() -> None:
    """A byte-level tokenizer with trimmed offsets, as GPT-2's."""
    from tokenizers import processors

    tokenizer = byte_tokenizer.__wrapped__()  # one of its own, not the cached one
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    model = FakeModelInfo(tokenizer=tokenizer)
    text = "hello wo wo"
    ids = tokenize(model, text)
    assert ids == ids_of(text) and len(ids) == 3
    raw = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert [start for start, _ in raw] == [0, 6, 9]
    assert find_text_offsets(model, text, ids) == (0, 5, 8)
