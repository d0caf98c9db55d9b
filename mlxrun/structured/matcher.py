"""One row that follows a grammar: scheduler.request.Constraint over an llguidance matcher.

An answer may think first: then all but stop tokens is allowed until the text that closes the thought, a
little whitespace may follow, and the grammar begins behind it. Everything here runs on the engine thread.
"""

from __future__ import annotations

import copy
import enum
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import llguidance

from mlxrun.errors import RequestError
from mlxrun.text.field_errors import shorten

GAP = 4  # tokens of whitespace, at most, between a thought and the answer
_REASON = 400  # characters of llguidance's reason in an error


@dataclass(frozen=True, slots=True, eq=False)
class GrammarTokens:
    """A model's vocabulary as llguidance knows it. `ends`: all its tokens that end an answer."""

    tokenizer: llguidance.LLTokenizer
    ends: frozenset[int]
    special: dict[str, int]  # texts of the tokens that no text is made of
    blank: bytes  # mask of tokens that are whitespace only
    everything: bytes  # mask of all tokens

    @classmethod
    def make(cls, backend: Any, eos_ids: frozenset[int]) -> GrammarTokens:
        """Of a tokenizer of the tokenizers library. `eos_ids`: the model's; without any, the tokenizer's."""
        plain = copy.copy(backend)
        plain.no_padding()
        plain.no_truncation()
        size = plain.get_vocab_size(with_added_tokens=True)
        ends = sorted(i for i in eos_ids if i < size)
        made = llguidance.LLTokenizer(plain.to_str(), eos_token=ends or None)
        added = plain.get_added_tokens_decoder()
        special = {t.content: i for i, t in added.items() if made.is_special_token(i)}
        blank = llguidance.LLMatcher(made, llguidance.LLMatcher.grammar_from_regex(r"[ \n\r\t]+"))
        all_bits = (1 << made.vocab_size) - 1
        everything = all_bits.to_bytes((made.vocab_size + 7) // 8, "little")
        return cls(made, frozenset(made.eos_tokens), special, blank.compute_bitmask(), everything)

    def literal(self, text: str) -> str:
        """A text in Lark: special tokens as what they are, the rest in quotes. Empty for no text."""
        if not self.special or not text:
            return quoted(text) if text else ""
        names = sorted(map(re.escape, self.special), key=len, reverse=True)
        parts = re.split(f"({'|'.join(names)})", text)
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else quoted(p) for p in parts if p)


@dataclass(frozen=True, slots=True)
class ReasoningBounds:
    """What comes before the grammar: text up to and with `closes`. `opens`: the token ids that begin it, if
    the model may begin it, or not; empty if the prompt has begun it."""

    closes: str
    opens: tuple[int, ...] = ()


class _Phase(enum.Enum):
    OPENING = enum.auto()  # the answer may begin a thought, or itself
    THINKING = enum.auto()
    GAP = enum.auto()  # after the thought: whitespace, or the answer
    ANSWER = enum.auto()
    ENDED = enum.auto()


class RowMatcher:
    """See scheduler.request.Constraint. `matcher`: of this row alone. `broken` is called if it fails."""

    def __init__(
        self,
        tokens: GrammarTokens,
        matcher: llguidance.LLMatcher,
        stop_ids: frozenset[int],
        thought: ReasoningBounds | None = None,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        self._tokens = tokens
        self._matcher = matcher
        self._stops = stop_ids
        # A grammar may end in a stop token that it names: it has no other reason to allow a special one.
        self._named = stop_ids.intersection(tokens.special.values())
        self._thought = thought
        self._broken = broken
        self._tail = b""  # of the thought: what the closing text may have begun in
        self._opened = 0  # tokens of `opens` that were said
        self._gap = 0
        self._phase = _Phase.ANSWER
        if thought is not None:
            self._phase = _Phase.OPENING if thought.opens else _Phase.THINKING

    @property
    def done(self) -> bool:
        """Whether nothing but a stop token may follow."""
        answering = self._phase is not _Phase.THINKING and self._opened == 0
        return self._phase is _Phase.ENDED or (answering and self._matcher.is_stopped())

    # -- what may follow ------------------------------------------------------------------------------------

    def mask(self) -> bytes:
        """The tokens that may follow."""
        if self._phase is _Phase.THINKING:
            return _changed(self._tokens.everything, forbid=self._stops)
        if self._phase is _Phase.ENDED:
            return _changed(b"", allow=self._stops)
        if self._phase is _Phase.OPENING and self._opened:
            assert self._thought is not None
            return _changed(b"", allow=[self._thought.opens[self._opened]])
        return self._answer_mask()

    def _answer_mask(self) -> bytes:
        """By the grammar; stop tokens exactly where it may end, or where it names them."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return _changed(b"", allow=self._stops)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._failed("cannot go on")
        if self._phase is _Phase.GAP and self._gap < GAP:
            bits = _either(bits, self._tokens.blank)
        complete = self._matcher.is_accepting()
        forbid = (self._tokens.ends | self._stops) - (frozenset() if complete else self._named)
        allow = set(self._stops) if complete else set[int]()
        if self._phase is _Phase.OPENING:
            assert self._thought is not None
            allow.add(self._thought.opens[0])
        return _changed(bits, forbid=forbid, allow=allow)

    # -- what was said --------------------------------------------------------------------------------------

    def accept(self, token: int) -> None:
        """Take a token in; RequestError if the grammar has no place for it."""
        match self._phase:
            case _Phase.THINKING:
                self._think(token)
            case _Phase.OPENING if self._opens(token):
                pass
            case _Phase.ENDED:
                pass  # drawn before anybody knew
            case _:
                self._answer(token)

    def _opens(self, token: int) -> bool:
        """Whether the token is the next of those that begin a thought."""
        assert self._thought is not None
        if token != self._thought.opens[self._opened]:
            return False
        self._opened += 1
        if self._opened == len(self._thought.opens):
            self._phase, self._opened = _Phase.THINKING, 0
        return True

    def _think(self, token: int) -> None:
        assert self._thought is not None
        closes = self._thought.closes.encode()
        text = self._tail + self._tokens.tokenizer.decode_bytes([token])
        before, found, rest = text.partition(closes)
        if not found:
            self._tail = before[-len(closes) + 1 :] if len(closes) > 1 else b""
            return
        self._phase, self._tail = _Phase.GAP, b""
        rest = rest.lstrip()
        if rest:  # of the same token: the answer has begun in it
            for each in self._tokens.tokenizer.tokenize_bytes(rest):
                self._answer(each)

    def _answer(self, token: int) -> None:
        if token in self._stops and _has(self.mask(), token):
            self._phase = _Phase.ENDED
            return
        fits = self._matcher.validate_tokens([token]) == 1
        if self._phase is _Phase.GAP and not fits and self._gap < GAP and _has(self._tokens.blank, token):
            self._gap += 1
            return
        self._phase = _Phase.ANSWER
        if not fits or not self._matcher.consume_token(token):
            raise self._failed(f"does not allow token {token}")

    def _failed(self, what: str) -> RequestError:
        why = ""
        if self._matcher.is_error():
            self._broken()
            why = reason(self._matcher)
        return RequestError(f"the grammar {what}{': ' if why else ''}{why}", code="grammar_failed")


def reason(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher failed, in one line."""
    text = re.sub(r"\s*\n\s*", " ", matcher.get_error().replace("<non-verbose/>", "")).strip()
    if text == "NoExtensionBias":
        return "no text matches it"
    return shorten(text, _REASON)


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _has(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _either(a: bytes, b: bytes) -> bytes:
    size = max(len(a), len(b))
    return (int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(size, "little")


def _changed(mask: bytes, *, forbid: Iterable[int] = (), allow: Iterable[int] = ()) -> bytes:
    """A mask without the one and with the other tokens."""
    bits = bytearray(mask)
    for token in forbid:
        if token // 8 < len(bits):
            bits[token // 8] &= ~(1 << token % 8)
    for token in allow:
        if token // 8 >= len(bits):
            bits.extend(bytes(token // 8 + 1 - len(bits)))
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)
