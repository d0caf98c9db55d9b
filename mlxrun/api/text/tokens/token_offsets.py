"""Where each token of a prompt begins in the prompt's text, in characters.

A token that is part of a character begins where the character does. One that stands for no text, such as
those that a tokenizer puts before a text, begins where the next one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.tokens.detokenize import Detokenizer, TokenBytes, get_token_bytes


def find_text_offsets(model: ModelInfo, text: str, ids: Sequence[int]) -> tuple[int, ...]:
    """The offsets of the tokens of a text that was tokenized with special tokens. What lies between two
    tokens belongs to the second: some tokenizers leave out a token's leading spaces."""
    made = model.tokenizer(text, add_special_tokens=True, return_offsets_mapping=True, verbose=False)
    assert tuple(made["input_ids"]) == tuple(ids)
    offsets, end = [], 0
    for first, last in made["offset_mapping"]:
        offsets.append(min(first, end) if last > first else end)
        end = max(end, last)
    return tuple(offsets)


def find_id_offsets(model: ModelInfo, text: str, ids: Sequence[int]) -> tuple[int, ...]:
    """The offsets of tokens in the text that they are decoded to, special tokens included."""
    backend = model.tokenizer.backend_tokenizer
    counted = _count_characters(get_token_bytes(backend), text, ids)
    if counted is not None:
        return counted
    added = backend.get_added_tokens_decoder().values()
    detokenizer = Detokenizer(backend, frozenset(token.content for token in added))
    offsets, end = [], 0
    for token in ids:
        offsets.append(min(end, len(text)))
        end += len(detokenizer.feed((token,)))
    return tuple(offsets)


def _count_characters(to_bytes: TokenBytes, text: str, ids: Sequence[int]) -> tuple[int, ...] | None:
    """The offsets by the bytes of each token, in a tenth of the time; None if these bytes are not the text,
    or are no valid text, so that only decoding tells what a token adds."""
    if "\ufffd" in text:
        return None
    offsets, end, pending, texts = [], 0, b"", []
    for token in ids:
        offsets.append(end)
        try:
            part = (pending + to_bytes(token)).decode()
        except UnicodeDecodeError:  # a character is not complete
            pending += to_bytes(token)
            continue
        texts.append(part)
        end, pending = end + len(part), b""
    return tuple(offsets) if not pending and "".join(texts) == text else None
