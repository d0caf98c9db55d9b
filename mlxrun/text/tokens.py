"""Text to token ids, and the tokens that another text begins with too without tokenising all of it.

An added token cuts a text in two that are normalised and tokenised on their own, so where two texts begin
alike, all before such a cut has the same tokens, and only what comes after it is tokenised again.
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
    """A text and its ids; `encoding` knows where in the text each token is."""

    text: str
    ids: tuple[int, ...]
    encoding: Encoding | None = None


def tokenise(host: ModelInfo, text: str, *, special: bool) -> PromptTokens:
    """Ids of `text`; `special`: with what the tokenizer puts around a text."""
    made = host.tokenizer(text, add_special_tokens=special, verbose=False)
    encodings = made.encodings
    return PromptTokens(text, tuple(made["input_ids"]), encodings[0] if encodings else None)


def shared_tokens(host: ModelInfo, tokens: PromptTokens, text: str) -> int:
    """How many leading tokens `tokens` and `text` have in common, both made with `special` off."""
    at, start = _cut(host.tokenizer.backend_tokenizer, tokens, shared(tokens.text, text))
    return at + shared(tokens.ids[at:], tokenise(host, text[start:], special=False).ids)


def shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How long two strings, or two tuples, are alike from the start: a bisection, as slices compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(backend: Tokenizer, tokens: PromptTokens, alike: int) -> tuple[int, int]:
    """The last cut that any text with the same first `alike` characters has too: which token makes it, and
    where that begins in the text; (0, 0) if there is none."""
    cuts, longest = _cuts(backend)
    last = alike - longest  # of the added tokens that begin at one place the longest counts: all must be seen
    if tokens.encoding is None or last <= 0:
        return 0, 0
    for at in range(_token_at(tokens.encoding, last), 0, -1):
        content = cuts.get(tokens.ids[at])
        if content is not None:
            start = int((tokens.encoding.token_to_chars(at) or (0, 0))[0])
            if 0 < start <= last and tokens.text.startswith(content, start):
                return at, start
    return 0, 0


def _token_at(encoding: Encoding, char: int) -> int:
    """The token that a character is in, or the nearest one before it: not every character is in a token."""
    tokens = (encoding.char_to_token(i) for i in range(char, -1, -1))
    return next((int(token) for token in tokens if token is not None), 0)


@functools.lru_cache(maxsize=8)
def _cuts(backend: Tokenizer) -> tuple[dict[int, str], int]:
    """Added tokens that are found in the text as it is and whatever is beside them; the longest of all."""
    added = backend.get_added_tokens_decoder()
    cuts = {i: token.content for i, token in added.items() if not (token.normalized or token.single_word)}
    return cuts, max((len(token.content) for token in added.values()), default=0)
