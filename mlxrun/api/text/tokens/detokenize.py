"""Converts the token ids of an answer to text as they arrive, and single tokens to their exact bytes.

Special tokens are not text; other added tokens (`<think>` in many models) are. A character that is split over
tokens appears when it is complete. Bytes that never form a character appear as U+FFFD once that is certain.

The offset of a token is where it begins in a text, in characters. A token that is part of a character begins
where the character does. A token without text, such as a tokenizer's first one, begins where the next does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mlxrun.api.text.model_info import ModelInfo

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.lru_cache(maxsize=8)
def get_special_ids(backend: Tokenizer) -> frozenset[int]:
    """Return the ids of special tokens, which never appear in text."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """The text of a growing list of tokens: the deltas join to the tokenizer's decoding of all tokens.

    Its clean-up of spaces is left out. A byte-fallback tokenizer decodes a run of bytes at once, so the valid
    beginning of an invalid run may already have been returned.
    """

    def __init__(
        self, backend: Tokenizer, visible_tokens: frozenset[str] = frozenset(), prefix_ids: Iterable[int] = ()
    ) -> None:
        """`visible_tokens`: special tokens that a parser reads as text. `prefix_ids`: the tokens before the
        text, which decide whether it begins with a space."""
        self._backend = backend
        self._hidden, self._has_visible = _find_hidden_ids(backend, visible_tokens)
        self._context = list(prefix_ids)  # tokens of the last delta, which the stream needs for the next
        self._pending: list[int] = []  # tokens after it whose text is incomplete
        self._stream = self._make_stream()

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        return "".join(self._step(i) for i in ids if i not in self._hidden)

    def finish(self) -> str:
        """Return the text of the remaining tokens. An incomplete character becomes U+FFFD."""
        if not self._pending:
            return ""
        context, pending = self._context, self._pending
        self._context, self._pending = context + pending, []
        before, joined = self._decode(context), self._decode(context + pending)
        return joined[len(before) :] if joined.startswith(before) else self._decode(pending)

    def _step(self, token: int) -> str:
        self._pending.append(token)
        try:
            text: str | None = self._stream.step(self._backend, token)
        except Exception:  # of no class of its own: a byte made the text before it invalid
            text = self.finish()
            self._stream = self._make_stream()
        if text is None:
            return ""
        if self._pending:
            self._context, self._pending = self._pending, []
        return text

    def _make_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=not self._has_visible)

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=not self._has_visible))


@functools.lru_cache(maxsize=32)
def _find_hidden_ids(backend: Tokenizer, visible: frozenset[str]) -> tuple[frozenset[int], bool]:
    """Special tokens that are left out of the text, and whether some are not."""
    special = get_special_ids(backend)
    hidden = frozenset(i for i in special if backend.id_to_token(i) not in visible)
    return hidden, len(hidden) < len(special)


class TokenBytes:
    """Returns the exact bytes of a token, with leading spaces and parts of characters."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._added: dict[int, str] = {
            i: token.content for i, token in backend.get_added_tokens_decoder().items()
        }
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        steps = decoder.get("decoders", [decoder])
        kinds = {step.get("type") for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._space = next((s for s in map(_find_space_marker, steps) if s is not None), None)
        self._known: dict[int, bytes] = {}  # of the tokens that were asked for

    def __call__(self, token: int) -> bytes:
        known = self._known.get(token)
        return self._known.setdefault(token, self._find(token)) if known is None else known

    def _find(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text: str | None = self._backend.id_to_token(token)
        if text is None:
            return b""  # a padding row of the embedding, which is no token
        if self._byte_level:
            table = make_byte_table()
            return b"".join(bytes((table[c],)) if c in table else c.encode() for c in text)
        if self._byte_fallback and (byte := _BYTE.fullmatch(text)):
            return bytes((int(byte[1], 16),))
        if self._space is not None:
            return text.replace(self._space, " ").encode()
        return str(self._backend.decode([token], skip_special_tokens=False)).encode()


@functools.lru_cache(maxsize=8)
def get_token_bytes(backend: Tokenizer) -> TokenBytes:
    """Return the TokenBytes of a tokenizer; one for each."""
    return TokenBytes(backend)


def _find_space_marker(step: dict[str, Any]) -> str | None:
    """The character that a decoder step turns into a space."""
    if step.get("type") == "Metaspace":
        return str(step["replacement"])
    if step.get("type") == "Replace" and step.get("content") == " ":
        found: str | None = step.get("pattern", {}).get("String")
        return found
    return None


@functools.lru_cache(maxsize=1)
def make_byte_table() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable bytes are themselves, others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def find_text_offsets(model: ModelInfo, text: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the offsets of the tokens of a text that was tokenized with special tokens. Text between two
    tokens belongs to the second, since some tokenizers leave out a token's leading spaces."""
    made = model.tokenizer(text, add_special_tokens=True, return_offsets_mapping=True, verbose=False)
    assert tuple(made["input_ids"]) == tuple(ids)
    offsets, end = [], 0
    for first, last in made["offset_mapping"]:
        offsets.append(min(first, end) if last > first else end)
        end = max(end, last)
    return tuple(offsets)


def find_id_offsets(model: ModelInfo, text: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the offsets of tokens in the text that they decode to. Special tokens are part of the text."""
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
