"""Tokenizing, and counting the tokens that two texts share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxrun.api.text.tokens import tokens as module
from mlxrun.api.text.tokens.tokens import check_length, count_shared_prefix, count_shared_tokens, tokenize
from mlxrun.core.errors import PromptTooLong
from tests.helpers.examples import count_examples
from tests.helpers.odd_tokenizers import TEXTS, TOKENIZERS, true_lcp
from tests.helpers.tokenizers import FakeModelInfo, byte_chars, byte_tokenizer, ids_of, metaspace_tokenizer


@settings(max_examples=count_examples(300), deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), TEXTS, TEXTS, TEXTS)
def test_shared_tokens_are_those_of_both_texts(name: str, start: str, one: str, two: str) -> None:
    """Although only the end of the second text is tokenised."""
    model_info = FakeModelInfo(tokenizer=TOKENIZERS[name]())
    for prefix in (start, f"<|im_start|>{start}<|im_end|>\n<|im_start|>user\n"):
        tokens = tokenize(model_info, prefix + one, add_special_tokens=False)
        assert tokens.ids == ids_of(prefix + one, model_info.tokenizer)
        found = count_shared_tokens(model_info, tokens, prefix + two)
        assert found == true_lcp(tokens.ids, ids_of(prefix + two, model_info.tokenizer))
        assert count_shared_tokens(model_info, tokens, tokens.text) == len(tokens.ids)


@pytest.mark.parametrize(
    ("added", "one", "two"),
    [
        (AddedToken("na", single_word=True, normalized=False), "hi na.", "hi nax"),
        (AddedToken("<think>", normalized=True), "hi <think>a", "hi <think>b"),
        (AddedToken("<e>", normalized=False, lstrip=True), "hi" + " " * 9 + "<e>", "hi" + " " * 9 + "x"),
        (AddedToken("<e>", normalized=False), "hi <e>", "hi <x"),
    ],
    ids=["word", "normalised", "strip", "part"],
)
def test_a_token_that_depends_on_what_follows_splits_nothing(added: AddedToken, one: str, two: str) -> None:
    """Without that token the text before it has other tokens, which merge with what is after them."""
    space = "\u0120"
    merges = [("i", space), ("i" + space, space), (space, "n"), (space, "<")]
    merges = merges[:2] if added.lstrip else merges[2:]
    vocab = {char: i for i, char in enumerate(byte_chars())}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.Replace("k>b", "k b")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_tokens([added])
    model_info = FakeModelInfo(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    for first, second in ((one, two), (two, one)):
        tokens = tokenize(model_info, "hello " + first, add_special_tokens=False)
        whole = ids_of("hello " + second, model_info.tokenizer)
        assert count_shared_tokens(model_info, tokens, "hello " + second) == true_lcp(tokens.ids, whole)


def test_shared_is_the_length_of_the_common_start() -> None:
    for a, b, expected in (("", "", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("x", "y", 0)):
        assert (
            count_shared_prefix(a, b)
            == count_shared_prefix(tuple(a), tuple(b))
            == count_shared_prefix(b, a)
            == expected
        )


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_huge_text_has_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made in a process of their own, with the same splits, with and without special tokens."""
    model_info = FakeModelInfo(tokenizer=TOKENIZERS[name]())
    text = "<|im_start|>user\nhello world \u0159e\u030c <think>na<|im_end|>\n" * 3 + "x"
    for add in (False, True):
        expected = tokenize(model_info, text, add_special_tokens=add)
        with monkeypatch.context() as patched:
            patched.setattr(module, "HUGE_TEXT", 10)
            patched.setattr(module, "is_plain", lambda tokenizer: True)
            patched.setattr(model_info.tokenizer.__class__, "__call__", None)
            found = tokenize(model_info, text, add_special_tokens=add)
        assert found == expected
    assert expected.splits or name == "metaspace"


@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer])
def test_a_text_that_is_certainly_too_long(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused without a token being made; a shorter one is left to be counted."""
    model_info = FakeModelInfo(tokenizer=make(), context_length=100)  # type: ignore[operator]
    with monkeypatch.context() as patched:
        patched.setattr(model_info.tokenizer.__class__, "__call__", None)
        patched.setattr(module, "count_least_tokens", lambda tokenizer, text: len(text) // 5)
        with pytest.raises(
            PromptTooLong, match="has 200 tokens or more.*the context of 100 tokens"
        ) as caught:
            check_length(model_info, "hello" * 200, "prompt")
        assert caught.value.param == "prompt"
        check_length(model_info, "hello" * 99, "prompt")
    with pytest.raises(PromptTooLong):
        check_length(model_info, "hello world " * 1000)
    check_length(model_info, "x" * 100)
