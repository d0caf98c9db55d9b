"""Added tokens of a tokenizer that split a text wherever they occur in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import Encoding, Tokenizer


def find_splits(
    backend: Tokenizer, text: str, ids: Sequence[int], encoding: Encoding
) -> tuple[tuple[int, int], ...]:
    """The index and the first character of each token of `text`, but the first, that splits it.

    The parts of a text before and after such a token are normalized and tokenized separately.
    """
    contents = find_splitting_tokens(backend)[0]
    found = []
    for index, token in enumerate(ids):
        content = contents.get(token)
        if content is not None and index:
            start = int((encoding.token_to_chars(index) or (0, 0))[0])
            if start > 0 and text.startswith(content, start):
                found.append((index, start))
    return tuple(found)


@functools.lru_cache(maxsize=8)
def find_splitting_tokens(backend: Tokenizer) -> tuple[dict[int, str], int]:
    """Added tokens that match the raw text whatever is beside them, and the length of the longest of all."""
    added = backend.get_added_tokens_decoder()
    contents = {i: token.content for i, token in added.items() if not (token.normalized or token.single_word)}
    return contents, max((len(token.content) for token in added.values()), default=0)
