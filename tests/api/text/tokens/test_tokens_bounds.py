"""The least number of tokens of a text: never more than it has, for any tokenizer and any text."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxrun.api.text.tokens import tokens as module
from mlxrun.api.text.tokens.detokenize import make_byte_table
from mlxrun.api.text.tokens.tokens import count_least_tokens, find_reach, is_plain
from mlxrun.config.settings import ModelSettings
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.examples import count_examples
from tests.helpers.odd_tokenizers import TEXTS, TOKENIZERS, nasty_tokenizer
from tests.helpers.tokenizers import byte_chars, byte_tokenizer, ids_of, metaspace_tokenizer

pytestmark = pytest.mark.thorough

Change = Callable[[Tokenizer], None]
MARKS = ("e\u030c", "\u212b\u0301", "\u1100\u1161\u11a8", "\u1fef", "\u037e", "\u0344", ">\u0338", "\u3000")


def changed(*changes: Change) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with long tokens, and something else."""
    vocab, merges = {char: i for i, char in enumerate(byte_chars())}, []
    for word in ("hello", "\u0120" * 8, "-" * 16, "\u00c5\u013b"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    for change in changes:
        change(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def set_normalizer(*parts: Any) -> Change:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.Sequence(list(parts))

    return change


def set_pre_tokenizers(*parts: Any) -> Change:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, tokenizer.pre_tokenizer])

    return change


def add_token(content: str, **options: bool) -> Change:
    return lambda tokenizer: tokenizer.add_tokens([AddedToken(content, **options)]) and None


BOUNDED: dict[str, Any] = {
    "bytes": byte_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "plain": changed(),
    "NFC": changed(set_normalizer(normalizers.NFC())),
    "NFD": changed(set_normalizer(normalizers.NFD())),
    "replacing": changed(set_normalizer(normalizers.Prepend("_"), normalizers.Replace(" ", "___"))),
    "splitting": changed(set_pre_tokenizers(pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits())),
    "stripping": changed(add_token("<e>", lstrip=True, rstrip=True)),
    "long": changed(add_token("hello world, hello world", normalized=True)),
}
UNKNOWN: dict[str, Any] = {
    "nasty": nasty_tokenizer(),
    "lower": changed(set_normalizer(normalizers.NFKC())),
    "strip": changed(set_normalizer(normalizers.Strip())),
    "shorter": changed(set_normalizer(normalizers.Replace("--", "-"))),
    "removes": changed(set_pre_tokenizers(pre_tokenizers.Split(" ", "removed"))),
    "white space": changed(set_pre_tokenizers(pre_tokenizers.WhitespaceSplit())),
    "words": PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    ),
    "bytes of bytes": changed(set_pre_tokenizers(pre_tokenizers.ByteLevel(add_prefix_space=False))),
}


def lacking(tokenizer: PreTrainedTokenizerFast, *lost: str, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer without these tokens, and all that are merged of them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in lost and not (set(t) & set(lost))}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    state["model"] |= options
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


CONTROLS = [char for char, byte in make_byte_table().items() if byte < 9 or byte in (0xC0, 0xC1, 0xF1, 0xF5)]
LETTERS = ["h", "e", "\u00c5", "\u00cc", "\u0120"]  # one is the first byte of a mark, and one is a space
UNK: dict[str, Any] = {"unk_token": "o", "fuse_unk": True}
SPACES = set_normalizer(normalizers.Replace(" ", "h"), normalizers.Prepend("h"))
LACKING: dict[str, Any] = {
    "controls": lacking(BOUNDED["plain"], *CONTROLS),
    "letters": lacking(BOUNDED["plain"], *LETTERS),
    "unk": lacking(BOUNDED["plain"], *LETTERS, **UNK),
    "unk each": lacking(BOUNDED["plain"], *LETTERS, **UNK | {"fuse_unk": False}),
    "in the middle": lacking(BOUNDED["plain"], *LETTERS, continuing_subword_prefix="##", merges=[]),
    "at the end": lacking(BOUNDED["plain"], "q", end_of_word_suffix="</w>", merges=[]),
    "whole words": lacking(BOUNDED["plain"], *LETTERS, ignore_merges=True),
    "NFC": lacking(BOUNDED["NFC"], *LETTERS),
    "NFD": lacking(BOUNDED["NFD"], "\u00cc", **UNK),
    "replaced": lacking(changed(SPACES), *LETTERS),
    "replaced by others": lacking(BOUNDED["replacing"], "\u0120"),
    "added": lacking(BOUNDED["long"], *LETTERS, **UNK),
    "fallback": lacking(BOUNDED["metaspace"], "<0xCC>", "<0x68>", "<0x20>"),
    "fallback, unk": lacking(BOUNDED["metaspace"], "<0xCC>", "<0x68>", **UNK | {"unk_token": "<unk>"}),
    "no fallback": lacking(BOUNDED["metaspace"], byte_fallback=False, unk_token="<unk>", fuse_unk=True),
    "no spaces": lacking(BOUNDED["metaspace"], "\u2581", "<0xE2>", fuse_unk=True),
    "unknown characters": PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    ),
}
PARTS = st.one_of(
    TEXTS,
    st.sampled_from(
        [*MARKS, "hello", " " * 9, "-" * 20, "<e>", "  <e>   ", "hello world, hello world", "<|im_end|>"]
    ),
    st.text(max_size=6),
)


@settings(max_examples=count_examples(800), deadline=None)
@given(
    st.sampled_from([*sorted(BOUNDED.items()), *sorted(LACKING.items())]),
    st.lists(PARTS, max_size=12).map("".join),
)
def test_no_text_has_fewer_tokens(case: tuple[str, Any], text: str) -> None:
    tokenizer = case[1]
    text = text.encode("utf-8", "replace").decode()
    for times in (1, 7):
        assert count_least_tokens(tokenizer, text * times) <= len(ids_of(text * times, tokenizer))


@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_the_bound_is_worth_something(name: str) -> None:
    """Ordinary text has a bound of at least a tenth of its tokens; a run of the longest token is close."""
    tokenizer = BOUNDED[name]
    text = "Some quick words, and hello to the world! " * 100
    assert count_least_tokens(tokenizer, text) > len(ids_of(text, tokenizer)) / 30
    assert count_least_tokens(BOUNDED["plain"], "-" * 16_000) in range(990, 1001)


@pytest.mark.parametrize("name", sorted(LACKING))
@pytest.mark.parametrize("text", ["h", "\x00", "e\u030c", "\u0159", " ", "  h", "\U00040000", "he\x01llo "])
def test_text_that_the_vocabulary_lacks_may_have_no_tokens(name: str, text: str) -> None:
    tokenizer = LACKING[name]
    assert count_least_tokens(tokenizer, text * 500) <= len(ids_of(text * 500, tokenizer))


def test_a_vocabulary_that_lacks_some_bytes_has_a_bound() -> None:
    """As that of SmolLM2, which lacks control characters and bytes that UTF-8 never has."""
    text = "Some quick words, and hello to the world! " * 100
    whole, lacking = BOUNDED["plain"], LACKING["controls"]
    assert count_least_tokens(lacking, text) == count_least_tokens(whole, text) > 100
    assert count_least_tokens(lacking, text + "\x00" * 999) == count_least_tokens(lacking, text)
    assert count_least_tokens(LACKING["letters"], "h.") < count_least_tokens(whole, "h.") == 1
    assert count_least_tokens(LACKING["fallback"], "a." * 100) >= 50
    assert count_least_tokens(LACKING["unknown characters"], "a!" * 100) == 99  # rounded down


@pytest.mark.parametrize("name", ["letters", "unk", "NFC", "fallback, unk", "at the end"])
def test_a_bound_without_regard_to_missing_bytes_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: every byte and character is taken for one that the vocabulary has."""
    backend = LACKING[name].backend_tokenizer
    size = len(find_reach(backend).shares)  # type: ignore[union-attr]
    monkeypatch.setattr(module, "find_kept", lambda *_: np.ones(size, np.bool_))
    find_reach.cache_clear()
    texts = [char * 2000 for char in ("h", "\u030c", " ", "q")]
    assert any(count_least_tokens(LACKING[name], t) > len(ids_of(t, LACKING[name])) for t in texts)
    find_reach.cache_clear()


def test_the_bytes_of_characters_are_those_of_utf_8() -> None:
    random = np.random.default_rng(1)
    has_byte = random.random(256) < 0.7
    spelled = module._find_spelled(has_byte)
    codes = [*range(0x900), *range(0xFF00, 0x10100), *range(0x10FF00, 0x110000)]
    for code in (code for code in codes if not 0xD800 <= code < 0xE000):
        assert spelled[code] == all(has_byte[byte] for byte in chr(code).encode())


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_tokenizer_that_may_remove_text_has_no_bound(name: str) -> None:
    assert find_reach(UNKNOWN[name].backend_tokenizer) is None
    assert count_least_tokens(UNKNOWN[name], "hello " * 1000) == 0


def test_a_tokenizer_that_changes_its_texts_has_no_bound() -> None:
    class Changing(PreTrainedTokenizerFast):
        def _encode_plus(self, text: str, **options: Any) -> Any:
            return super()._encode_plus(text[:1], **options)

    tokenizer = Changing(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert not is_plain(tokenizer) and is_plain(byte_tokenizer())
    assert count_least_tokens(tokenizer, "hello " * 1000) == 0


def test_a_bound_without_regard_to_normalizers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: what merges is counted as if it did not."""
    tokenizer = changed(set_normalizer(normalizers.NFC()))
    text = "e\u030c" * 60
    assert count_least_tokens(tokenizer, text) <= len(ids_of(text, tokenizer))
    monkeypatch.setitem(module._SHRINKING, "NFC", 1)
    find_reach.cache_clear()
    added = changed(set_normalizer(normalizers.NFC()), add_token("\u011b" * 30, normalized=True))
    assert count_least_tokens(added, text) > len(ids_of(text, added))
    find_reach.cache_clear()


def test_normal_forms_shorten_no_more_than_is_said() -> None:
    """Of every character: all texts that are equivalent to it have at most so many times its characters and
    bytes. A text of several characters is at most a decomposition of each."""
    every = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    odd = [char for char in every if not unicodedata.is_normalized("NFD", char)]
    decomposed = {char: unicodedata.normalize("NFD", char) for char in odd}
    sources: dict[str, int] = {}  # the longest single character that decomposes to exactly this one
    for char, parts in decomposed.items():
        if len(parts) == 1:
            sources[parts] = max(sources.get(parts, len(parts.encode())), len(char.encode()))
    most = 1.0  # of the others, each of which is equivalent to itself alone
    for char in (*decomposed, *sources):
        parts = decomposed.get(char, char)
        if unicodedata.is_normalized("NFC", char):
            longest = sum(sources.get(part, len(part.encode())) for part in parts)
            most = max(most, len(parts), longest / len(char.encode()))
    assert most <= module._SHRINKING["NFC"]


def test_the_bound_of_the_embedded_model() -> None:
    tokenizer = load_model_info(ModelSettings()).tokenizer
    text = "The quick brown fox jumps over the lazy dog. " * 500
    least, count = count_least_tokens(tokenizer, text), len(ids_of(text, tokenizer))
    assert count / 10 < least <= count


def test_white_space_that_a_token_swallows_counts_nothing() -> None:
    assert count_least_tokens(BOUNDED["stripping"], " " * 10_000 + "<e>" + "\u3000" * 10_000) <= 1
    assert TOKENIZERS["nasty"]  # has one too
