"""Converts the token ids of an answer to text as they arrive, and single tokens to their exact bytes.

Special tokens are not text; other added tokens (`<think>` in many models) are. A character that is split over
tokens appears when it is complete; bytes that never form one appear as U+FFFD once that is certain.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.lru_cache(maxsize=8)
def get_special_ids(backend: Tokenizer) -> frozenset[int]:
    """Ids that never appear in text."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """The text of a growing list of tokens: the deltas joined equal the tokenizer's decode of all tokens.

    (Without its clean-up of spaces. A byte-fallback tokenizer decodes a run of bytes at once, so for an
    invalid run the valid beginning may already have been returned.)
    """

    def __init__(
        self, backend: Tokenizer, visible_tokens: frozenset[str] = frozenset(), prefix_ids: Iterable[int] = ()
    ) -> None:
        """`visible_tokens`: special tokens that are text, as a parser reads them. `prefix_ids`: tokens that
        the text continues, which decide whether it begins with a space."""
        self._backend = backend
        self._hidden, self._has_visible = _find_hidden_ids(backend, visible_tokens)
        self._context = list(prefix_ids)  # tokens of the last delta, which the stream needs for the next
        self._pending: list[int] = []  # tokens after it whose text is incomplete
        self._stream = self._make_stream()

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self._step(i) for i in ids if i not in self._hidden)

    def finish(self) -> str:
        """The text of the remaining tokens: an incomplete character is U+FFFD."""
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
    """The bytes of single tokens, with leading spaces and parts of characters."""

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
    """The one TokenBytes of a tokenizer."""
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
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}
