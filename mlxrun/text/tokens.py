"""Tokenizing a text, and counting the tokens that two texts share without tokenizing all of the second.

An added token splits a text into parts that are normalized and tokenized separately. So if two texts share a
prefix, everything before the last such split in it has the same tokens, and only the rest is tokenized again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding, Tokenizer

from mlxrun.text.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A text and its token ids; `encoding` maps tokens to characters."""

    text: str
    ids: tuple[int, ...]
    encoding: Encoding | None = None


def tokenize(model: ModelInfo, text: str, *, add_special_tokens: bool) -> PromptTokens:
    """Token ids of `text`; `add_special_tokens`: with those that the tokenizer puts around a text."""
    made = model.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    encodings = made.encodings
    return PromptTokens(text, tuple(made["input_ids"]), encodings[0] if encodings else None)


def count_shared_tokens(model: ModelInfo, tokens: PromptTokens, text: str) -> int:
    """The number of leading tokens that `tokens` and `text` share, both without special tokens around."""
    shared = count_shared_prefix(tokens.text, text)
    split, start = _find_last_split(model.tokenizer.backend_tokenizer, tokens, shared)
    rest = tokenize(model, text[start:], add_special_tokens=False)
    return split + count_shared_prefix(tokens.ids[split:], rest.ids)


def count_shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two strings or tuples: a bisection, as slices compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _find_last_split(backend: Tokenizer, tokens: PromptTokens, shared: int) -> tuple[int, int]:
    """The last added token that also splits any other text with the same first `shared` characters: its index
    and its first character; (0, 0) if there is none."""
    contents, longest = _find_splitting_tokens(backend)
    last = shared - longest  # the tokenizer takes the longest match, so all candidates must lie within
    if tokens.encoding is None or last <= 0:
        return 0, 0
    for index in range(_find_token_at(tokens.encoding, last), 0, -1):
        content = contents.get(tokens.ids[index])
        if content is not None:
            start = int((tokens.encoding.token_to_chars(index) or (0, 0))[0])
            if 0 < start <= last and tokens.text.startswith(content, start):
                return index, start
    return 0, 0


def _find_token_at(encoding: Encoding, char: int) -> int:
    """The token of a character, or the nearest one before it: not every character is in a token."""
    tokens = (encoding.char_to_token(i) for i in range(char, -1, -1))
    return next((int(token) for token in tokens if token is not None), 0)


@functools.lru_cache(maxsize=8)
def _find_splitting_tokens(backend: Tokenizer) -> tuple[dict[int, str], int]:
    """Added tokens that match the raw text whatever is beside them, and the length of the longest of all."""
    added = backend.get_added_tokens_decoder()
    contents = {i: token.content for i, token in added.items() if not (token.normalized or token.single_word)}
    return contents, max((len(token.content) for token in added.values()), default=0)
