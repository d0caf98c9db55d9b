"""Where each token of a prompt begins in the prompt's text, in characters.

A token that is part of a character begins where the character does. One that stands for no text, such as
those that a tokenizer puts before a text, begins where the next one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.text.detokenize import Detokenizer
from mlxrun.text.model_info import ModelInfo


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
    added = backend.get_added_tokens_decoder().values()
    detokenizer = Detokenizer(backend, frozenset(token.content for token in added))
    offsets, end = [], 0
    for token in ids:
        offsets.append(min(end, len(text)))
        end += len(detokenizer.feed((token,)))
    return tuple(offsets)
