"""Tokenizes a text, and counts the tokens that two texts share without tokenizing all of the second.

An added token splits a text into parts that are normalized and tokenized separately. If two texts share a
prefix, all before the last split in it has the same tokens. Only the rest is tokenized again.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.tokens.token_bounds import count_least_tokens, is_plain
from mlxrun.api.text.tokens.tokenize_process import find_splits, find_splitting_tokens, tokenize_in_process
from mlxrun.core.errors import PromptTooLong
from mlxrun.core.workers import HUGE_TEXT, check_abandoned


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A text and its token ids. `splits`: from tokenize_process.find_splits; without them all is slower."""

    text: str
    ids: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()


def tokenize(model: ModelInfo, text: str, *, add_special_tokens: bool) -> PromptTokens:
    """Tokenize `text`. `add_special_tokens`: add those that the tokenizer puts around a text. Abandoned if
    nobody waits any more."""
    check_abandoned()
    tokenizer = model.tokenizer
    if len(text) > HUGE_TEXT and is_plain(tokenizer):
        return PromptTokens(
            text, *tokenize_in_process(tokenizer, text, add_special_tokens=add_special_tokens)
        )
    made = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    ids, encodings = tuple(made["input_ids"]), made.encodings
    splits = find_splits(tokenizer.backend_tokenizer, text, ids, encodings[0]) if encodings else ()
    return PromptTokens(text, ids, splits)


def check_length(model: ModelInfo, text: str, param: str | None = None) -> None:
    """Raise PromptTooLong if a text has certainly more tokens than the context, without tokenizing it."""
    if len(text) <= model.context_length:
        return
    least = count_least_tokens(model.tokenizer, text)
    if least >= model.context_length:
        raise PromptTooLong(
            f"the prompt has {least} tokens or more; with at least one token of answer that is more than "
            f"the context of {model.context_length} tokens",
            param=param,
        )


def count_shared_tokens(model: ModelInfo, tokens: PromptTokens, text: str) -> int:
    """Count the leading tokens that `tokens` and `text` share, both without special tokens around."""
    shared = count_shared_prefix(tokens.text, text)
    # The tokenizer takes the longest match, so all candidates for a split must lie within what is shared.
    last = shared - find_splitting_tokens(model.tokenizer.backend_tokenizer)[1]
    known = bisect.bisect_right(tokens.splits, last, key=lambda split: split[1])
    split, start = tokens.splits[known - 1] if known else (0, 0)
    rest = tokenize(model, text[start:], add_special_tokens=False)
    return split + count_shared_prefix(tokens.ids[split:], rest.ids)


def count_shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two strings or tuples."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
