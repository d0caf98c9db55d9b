"""Added tokens that split a text."""

from __future__ import annotations

from mlxrun.api.text.tokens.tokenize_process import find_splits, find_splitting_tokens
from tests.helpers.odd_tokenizers import nasty_tokenizer
from tests.helpers.tokenizers import byte_tokenizer


def test_splits_are_the_tokens_and_their_characters() -> None:
    backend = byte_tokenizer().backend_tokenizer
    text = "<|im_start|>\u0159<think>x<|im_end|>"
    encoding = backend.encode(text, add_special_tokens=False)
    found = find_splits(backend, text, encoding.ids, encoding)
    assert [text[start:] for _, start in found] == ["<think>x<|im_end|>", "<|im_end|>"]
    assert [backend.id_to_token(encoding.ids[index]) for index, _ in found] == ["<think>", "<|im_end|>"]


def test_tokens_that_depend_on_their_neighbours_split_nothing() -> None:
    contents, longest = find_splitting_tokens(nasty_tokenizer().backend_tokenizer)
    assert "<|im_end|>" in contents.values() and longest == len("<|im_start|>user\nZ")
    assert not {"na", "<think>"} & set(contents.values())
