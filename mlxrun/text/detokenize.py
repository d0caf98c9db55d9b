"""Token ids to text, one request at a time, as they come; and the exact text of a single token.

Special tokens are not text; other added tokens (`<think>` in many models) are. A character that is spread
over tokens appears when it is complete; bytes that never become one appear as U+FFFD when that is certain.
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
def special_ids(backend: Tokenizer) -> frozenset[int]:
    """Ids that never appear in text."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """Text of a growing list of tokens: the pieces joined equal the tokenizer's decode of all of them.

    (Without its clean-up of spaces, which eats them. A byte-fallback tokenizer decodes a run of bytes as a
    whole, so there a broken run may keep the valid beginning that was already given.)
    """

    def __init__(
        self, backend: Tokenizer, shown: frozenset[str] = frozenset(), before: Iterable[int] = ()
    ) -> None:
        """`shown`: special tokens that are text all the same, since a parser reads them. `before`: tokens
        that the text goes on from: there a space may stand that would be none at a text's beginning."""
        self._backend = backend
        self._special, self._shown = _hidden(backend, shown)
        self._given = list(before)  # tokens of the newest piece: what the stream sees before the next one
        self._pending: list[int] = []  # tokens after it that are no whole text yet
        self._stream = DecodeStream(ids=self._given, skip_special_tokens=not self._shown)

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self._step(i) for i in ids if i not in self._special)

    def finish(self) -> str:
        """What the tokens left over decode to: an unfinished character is U+FFFD."""
        if not self._pending:
            return ""
        given, pending = self._given, self._pending
        self._given, self._pending = given + pending, []
        before, whole = self._decode(given), self._decode(given + pending)
        return whole[len(before) :] if whole.startswith(before) else self._decode(pending)

    def _step(self, token: int) -> str:
        self._pending.append(token)
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # tokenizers has no class for "a byte made the text before it invalid"
            piece = self.finish()
            self._stream = DecodeStream(ids=self._given, skip_special_tokens=not self._shown)
        if piece is None:
            return ""
        if self._pending:
            self._given, self._pending = self._pending, []
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=not self._shown))


@functools.lru_cache(maxsize=32)
def _hidden(backend: Tokenizer, shown: frozenset[str]) -> tuple[frozenset[int], bool]:
    """Special tokens that stay out of the text, and whether any is let in."""
    special = special_ids(backend)
    hidden = frozenset(i for i in special if backend.id_to_token(i) not in shown)
    return hidden, len(hidden) < len(special)


class TokenBytes:
    """The bytes that one token stands for, leading space and half characters included."""

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
        self._space = next((s for s in map(_space, steps) if s is not None), None)

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text: str | None = self._backend.id_to_token(token)
        if text is None:
            return b""  # a padding row of the embedding: no such token
        if self._byte_level:
            table = _byte_table()
            return b"".join(bytes((table[c],)) if c in table else c.encode() for c in text)
        if self._byte_fallback and (byte := _BYTE.fullmatch(text)):
            return bytes((int(byte[1], 16),))
        if self._space is not None:
            return text.replace(self._space, " ").encode()
        return str(self._backend.decode([token], skip_special_tokens=False)).encode()


def _space(step: dict[str, Any]) -> str | None:
    """The character that a decoder step turns into a space."""
    if step.get("type") == "Metaspace":
        return str(step["replacement"])
    if step.get("type") == "Replace" and step.get("content") == " ":
        found: str | None = step.get("pattern", {}).get("String")
        return found
    return None


@functools.lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}
