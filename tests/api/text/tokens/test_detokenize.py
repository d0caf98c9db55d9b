"""Streaming text: no broken characters, special tokens are not text, white space stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.text.tokens.detokenize import Detokenizer, TokenBytes
from tests.helpers.examples import count_examples
from tests.helpers.tokenizers import SPECIAL, byte_tokenizer, ids_of, metaspace_tokenizer

SAMPLES = (
    "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148 \u00fap\u011bl",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ff!",
    "  two  spaces\n\n\ttab  ",
    "hello <think>\n world</think>  <tool_call>{}</tool_call>",
    "ends in a replacement \ufffd",
)


def deltas(tokenizer: Any, ids: Sequence[int], cuts: Iterable[int] | None = None) -> list[str]:
    """What a Detokenizer gives for `ids` one by one, or in parts that end at `cuts`; last its finish()."""
    stream = Detokenizer(tokenizer.backend_tokenizer)
    inner = range(1, len(ids)) if cuts is None else sorted(min(cut, len(ids)) for cut in cuts)
    bounds = [0, *inner, len(ids)]
    return [*(stream.feed(ids[start:end]) for start, end in pairwise(bounds)), stream.finish()]


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer])
def test_text_comes_whole_in_every_split(text: str, make: Any) -> None:
    """One token at a time, no half character is ever shown; join it is the full decode."""
    tokenizer = make()
    ids = list(ids_of(text, tokenizer))
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == whole(tokenizer, ids)
    assert "\ufffd" in text or all("\ufffd" not in part for part in parts)
    for cut in range(1, len(ids)):
        first, second, last = deltas(tokenizer, ids, [cut])
        assert first == "".join(parts[:cut])
        assert first + second + last == "".join(parts)


@settings(max_examples=count_examples(200), deadline=None)
@given(
    st.lists(st.integers(0, len(byte_tokenizer()) - 1), max_size=30), st.lists(st.integers(0, 30), max_size=5)
)
def test_any_bytes_join_to_the_full_decode(ids: list[int], cuts: list[int]) -> None:
    """For whatever a model may say, broken bytes and special tokens included, however it is split."""
    tokenizer = byte_tokenizer()
    assert "".join(deltas(tokenizer, ids, cuts)) == whole(tokenizer, ids)


@settings(max_examples=count_examples(200), deadline=None)
@given(st.lists(st.integers(256, len(metaspace_tokenizer()) - 1), max_size=30))
def test_words_with_metaspace_join_to_the_full_decode(ids: list[int]) -> None:
    """The first space is no text, every other one is, whatever stands between."""
    tokenizer = metaspace_tokenizer()
    assert "".join(deltas(tokenizer, ids)) == whole(tokenizer, ids)


@settings(max_examples=count_examples(100), deadline=None)
@given(st.lists(st.integers(0, len(metaspace_tokenizer()) - 1), max_size=20))
def test_broken_byte_fallback_never_fails(ids: list[int]) -> None:
    """A run of bytes is decoded as a whole, so a late one may break what was shown; the rest still comes."""
    tokenizer = metaspace_tokenizer()
    join = "".join(deltas(tokenizer, ids))
    words = [tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert join.count("world") == words.count("\u2581world")


def test_a_valid_beginning_is_not_returned_twice() -> None:
    """`a` from a byte token was shown before its run broke: it is neither repeated nor taken back."""
    tokenizer = metaspace_tokenizer()
    word = tokenizer.convert_tokens_to_ids("\u2581b")
    parts = deltas(tokenizer, [ord("a"), 0xE4, word, word])
    assert "".join(parts) == "a\ufffd b b"
    parts = deltas(tokenizer, [*"\u0161".encode(), 0xE4, word, word])
    assert "".join(parts) == "\u0161\ufffd b b"


def test_white_space_between_words_stays() -> None:
    """`a`, ` b`, ` c` is `a b c`."""
    tokenizer = metaspace_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("\u2581a", "\u2581b", "\u2581", "\u2581a", ".")]
    assert deltas(tokenizer, ids) == ["a", " b", " ", " a", ".", ""]


def test_special_tokens_are_not_text_but_other_added_ones_are() -> None:
    """Decided by the tokenizer's own mark, not by looks."""
    tokenizer = byte_tokenizer()
    ids = ids_of("<think>a</think><|im_end|>b<tool_call>")
    assert "".join(deltas(tokenizer, list(ids))) == "<think>a</think>b<tool_call>"
    assert not any(mark in "".join(deltas(tokenizer, list(ids))) for mark in SPECIAL)


def test_bytes_that_end_nowhere_appear_once_at_the_end() -> None:
    """An unfinished character is withheld; only the true end shows it as U+FFFD."""
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer.backend_tokenizer)
    assert stream.feed(list("a\u4f60".encode())[:-1]) == "a"
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    """Embeddings are often padded to a round number of rows."""
    assert deltas(byte_tokenizer(), [97, 100_000, 98]) == ["a", "", "b", ""]


def test_endless_special_tokens_cost_no_more_each_time() -> None:
    """A model that repeats a pad token must not make each step longer."""
    stream = Detokenizer(byte_tokenizer().backend_tokenizer)
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert stream.feed([end] * 10_000) == ""
    assert stream._pending == [] and stream._context == []


@pytest.mark.parametrize("text", SAMPLES)
def test_token_bytes_join_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    to_bytes = TokenBytes(tokenizer.backend_tokenizer)
    assert b"".join(map(to_bytes, ids_of(text))) == text.encode()


def test_token_bytes_of_metaspace_keep_the_space() -> None:
    tokenizer = metaspace_tokenizer()
    to_bytes = TokenBytes(tokenizer.backend_tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("\u2581hello", "lo", "<0xE4>", "</s>")]
    assert [to_bytes(i) for i in ids] == [b" hello", b"lo", b"\xe4", b"</s>"]
    assert to_bytes(100_000) == b""
