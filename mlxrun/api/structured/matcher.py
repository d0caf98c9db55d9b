"""The state of one row that follows a grammar: a GrammarMatcher of core/request.py, by llguidance.

An answer may begin with reasoning. Within it every token but a stop token is allowed. Then comes the text
that closes the reasoning, perhaps a little white space, and the grammar. All of this runs on the engine
thread.

A grammar lets the digits of numbers in JSON grow without end. A schema cannot bound them: a bound of the
value leaves fractions endless, and forbids exponents in llguidance. So digits are counted as they come. Texts
are left alone.
"""

from __future__ import annotations

import copy
import enum
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import shorten

DIGITS = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = b'"\\'


class _DigitRun(enum.Enum):
    """Digits before the point of a number, behind it, or of its exponent. The values: the most of each."""

    WHOLE = 25
    FRACTION = 30
    EXPONENT = 3


@dataclass(slots=True)
class NumberDigits:
    """Where in a JSON text an answer is, as far as numbers need it."""

    part: _DigitRun = _DigitRun.WHOLE
    digits: int = 0
    in_text: bool = False
    escaped: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the number that is being written should have no more digits."""
        return self.digits >= self.part.value

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        for byte in data:
            if self.in_text:
                ends = byte == _QUOTE and not self.escaped
                self.escaped = byte == _BACKSLASH and not self.escaped
                self.in_text = not ends
            elif byte in DIGITS:
                self.digits += 1
            elif byte in b"eE" and self.digits:  # else of `true` and `false`
                self.part, self.digits = _DigitRun.EXPONENT, 0
            elif not (byte in b"+-" and self.part is _DigitRun.EXPONENT):
                self.part, self.digits = _DigitRun.FRACTION if byte == ord(".") else _DigitRun.WHOLE, 0
                self.in_text = byte == _QUOTE


MAX_GAP = 4  # tokens of white space between reasoning and the answer
_MAX_REASON = 400  # characters of llguidance's reason in an error
# What a client can do about the limits of llguidance, by its words for them.
_PLAIN_REASONS = {
    r"Current row has \d+ items|Too many items \(limit": (
        "too many alternatives are possible at one place, or a rule never ends; have fewer, such as fewer "
        "optional properties"
    ),
    r"too many states": "it takes too many states; use shorter texts, simpler patterns and smaller limits",
    r"too many expressions|\((grammar|number of symbols)\) too big|schema too large|fuel exhausted": (
        "it is too large or too complex; use shorter texts and lists, simpler patterns and smaller limits"
    ),
}
PROBE_TOKENS = 16  # of an answer, which are tried when a grammar is compiled
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class GrammarTokens:
    """A model's vocabulary as llguidance knows it."""

    tokenizer: llguidance.LLTokenizer
    end_ids: frozenset[int]  # all tokens that end an answer
    special_ids: dict[str, int]  # the special tokens, which are no text, by their names
    whitespace_mask: bytes  # of tokens that are white space only
    digit_mask: bytes  # of tokens that begin with a digit
    full_mask: bytes  # of all tokens

    @classmethod
    def from_tokenizer(cls, backend: Any, eos_ids: frozenset[int]) -> GrammarTokens:
        """Read a tokenizer of the tokenizers library. `eos_ids`: the model's; if empty, the tokenizer's."""
        plain = copy.copy(backend)
        plain.no_padding()
        plain.no_truncation()
        size = plain.get_vocab_size(with_added_tokens=True)
        end_ids = sorted(i for i in eos_ids if i < size)
        tokenizer = llguidance.LLTokenizer(plain.to_str(), eos_token=end_ids or None)
        added = plain.get_added_tokens_decoder()
        special_ids = {t.content: i for i, t in added.items() if tokenizer.is_special_token(i)}
        blank, digit = (
            llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(regex)).compute_bitmask()
            for regex in (r"[ \n\r\t]+", r"[0-9](.|\n)*")
        )
        all_bits = (1 << tokenizer.vocab_size) - 1
        full_mask = all_bits.to_bytes((tokenizer.vocab_size + 7) // 8, "little")
        return cls(tokenizer, frozenset(tokenizer.eos_tokens), special_ids, blank, digit, full_mask)

    def write_literal(self, text: str) -> str:
        """Write a text in Lark: special tokens by their ids, the rest in quotes. Empty for no text."""
        if not self.special_ids or not text:
            return quote_literal(text) if text else ""
        names = sorted(map(re.escape, self.special_ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(names)})", text)
        ids = self.special_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else quote_literal(part) for part in parts if part)


@dataclass(frozen=True, slots=True)
class ReasoningBounds:
    """The reasoning before the grammar; it ends with `closer`. `opener_ids`: the tokens with which the model
    may begin it; empty if the prompt has begun it."""

    closer: str
    opener_ids: tuple[int, ...] = ()


class _Phase(enum.Enum):
    OPENING = enum.auto()  # the answer may begin reasoning, or itself
    REASONING = enum.auto()
    GAP = enum.auto()  # behind the reasoning: white space, or the answer
    ANSWER = enum.auto()
    ENDED = enum.auto()


class RowMatcher:
    """The state of one row. `matcher`: this row's own. `make_error`: makes the error for a reason; its second
    argument says whether llguidance has failed, so that the grammar is of no more use. `digits`: bounds the
    numbers of an answer that is JSON."""

    def __init__(
        self,
        tokens: GrammarTokens,
        matcher: llguidance.LLMatcher,
        stop_ids: frozenset[int],
        reasoning: ReasoningBounds | None = None,
        make_error: Callable[[str, bool], RequestError] = lambda reason, _: RequestError(reason),
        digits: NumberDigits | None = None,
    ) -> None:
        self._tokens = tokens
        self._matcher = matcher
        self._stop_ids = stop_ids
        # A grammar may end in a stop token that it names: it has no other reason to allow a special token.
        self._named_stop_ids = stop_ids.intersection(tokens.special_ids.values())
        self._closer = reasoning.closer.encode() if reasoning is not None else b""
        self._opener_ids = reasoning.opener_ids if reasoning is not None else ()
        self._make_row_error = make_error
        self._digits = digits
        self._tail = b""  # the end of the reasoning, where the closer may have begun
        self._opened = 0  # how many of `opener_ids` have come
        self._gap = 0
        self._phase = _Phase.ANSWER
        if reasoning is not None:
            self._phase = _Phase.OPENING if self._opener_ids else _Phase.REASONING

    @property
    def done(self) -> bool:
        """Whether only a stop token may follow."""
        answering = self._phase is not _Phase.REASONING and self._opened == 0
        return self._phase is _Phase.ENDED or (answering and self._matcher.is_stopped())

    # -- what may follow ------------------------------------------------------------------------------------

    def mask(self) -> bytes:
        """Return the tokens that may follow, as a bit mask. RequestError if llguidance fails."""
        if self._phase is _Phase.REASONING:
            return change_mask(self._tokens.full_mask, forbid=self._stop_ids)
        if self._phase is _Phase.ENDED:
            return change_mask(b"", allow=self._stop_ids)
        if self._phase is _Phase.OPENING and self._opened:
            return change_mask(b"", allow=[self._opener_ids[self._opened]])
        return self._make_answer_mask()

    def _make_answer_mask(self) -> bytes:
        """By the grammar; stop tokens exactly where it may end, or where it names them."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return change_mask(b"", allow=self._stop_ids)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._make_error("cannot continue")
        if self._phase is _Phase.GAP and self._gap < MAX_GAP:
            bits = _unite(bits, self._tokens.whitespace_mask)
        complete = self._matcher.is_accepting()
        forbid = (self._tokens.end_ids | self._stop_ids) - (frozenset() if complete else self._named_stop_ids)
        allow = set(self._stop_ids) if complete else set[int]()
        if self._phase is _Phase.OPENING:
            allow.add(self._opener_ids[0])
        mask = change_mask(bits, forbid=forbid, allow=allow)
        return self._end_number(mask) if self._digits is not None and self._digits.is_full else mask

    def _end_number(self, mask: bytes) -> bytes:
        """Forbid further digits of a number, unless nothing else may follow."""
        digits = int.from_bytes(self._tokens.digit_mask, "little")
        left = int.from_bytes(mask, "little") & ~digits
        return left.to_bytes(len(mask), "little") if left else mask

    def fork(self) -> RowMatcher:
        """Make an independent copy."""
        made = copy.copy(self)
        made._matcher, made._digits = self._matcher.deep_copy(), copy.copy(self._digits)
        return made

    # -- what has come --------------------------------------------------------------------------------------

    def accept(self, token: int) -> None:
        """Take in a token. Raises RequestError if the grammar does not allow it."""
        match self._phase:
            case _Phase.REASONING:
                self._accept_reasoning(token)
            case _Phase.OPENING if token == self._opener_ids[self._opened]:
                self._opened += 1
                if self._opened == len(self._opener_ids):
                    self._phase, self._opened = _Phase.REASONING, 0
            case _Phase.ENDED:
                pass  # sampled before the end was known
            case _:
                self._accept_answer(token)

    def _accept_reasoning(self, token: int) -> None:
        text = self._tail + self._tokens.tokenizer.decode_bytes([token])
        before, closed, rest = text.partition(self._closer)
        if not closed:
            self._tail = before[-len(self._closer) + 1 :] if len(self._closer) > 1 else b""
            return
        self._phase, self._tail = _Phase.GAP, b""
        rest = rest.lstrip()
        if rest:  # the answer has begun in the token that closes the reasoning
            for each in self._tokens.tokenizer.tokenize_bytes(rest):
                self._accept_answer(each)

    def _accept_answer(self, token: int) -> None:
        if token in self._stop_ids and _is_allowed(token, self.mask()):
            self._phase = _Phase.ENDED
            return
        fits = self._matcher.validate_tokens([token]) == 1
        blank = _is_allowed(token, self._tokens.whitespace_mask)
        if self._phase is _Phase.GAP and not fits and self._gap < MAX_GAP and blank:
            self._gap += 1
            return
        self._phase = _Phase.ANSWER
        if not fits or not self._matcher.consume_token(token):
            raise self._make_error(f"does not allow token {token}")
        if self._digits is not None:
            self._digits.feed(self._tokens.tokenizer.decode_bytes([token]))

    def _make_error(self, what: str) -> RequestError:
        spoilt = self._matcher.is_error()
        reason = f": {get_error_reason(self._matcher)}" if spoilt else ""
        return self._make_row_error(f"{what}{reason}", spoilt)


def get_error_reason(matcher: llguidance.LLMatcher) -> str:
    """Return in one line why a matcher failed."""
    # Positions are in the grammar that mlxrun writes, which the client never sees.
    error = re.sub(r"\n *\d+ \| .*", "", matcher.get_error().replace("<non-verbose/>", ""), flags=re.DOTALL)
    if error.startswith("panic:") or "<backtrace>" in error:
        log.error("llguidance failed: %s", shorten(error.partition("<backtrace>")[0].strip()))
        return "the grammar library failed on it; it is probably too large"
    for pattern, plain in _PLAIN_REASONS.items():
        if re.search(pattern, error):
            return plain
    error = re.sub(r"( \(in regex\))?: regex parse error:.*\nerror: ", ": ", error, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", re.sub(r"^(at )?\d+\(\d+\): ", "", error)).strip()
    if text == "NoExtensionBias":
        return "no text matches it"
    return shorten(text, _MAX_REASON)


def try_answer(matcher: llguidance.LLMatcher, tokens: GrammarTokens) -> None:
    """Write the beginning of some answer, which finds most faults of a grammar. The first mask is the
    slowest, and a part that is too large fails where a row enters it. `matcher` has the error, if any."""
    for _ in range(PROBE_TOKENS):
        mask = np.frombuffer(change_mask(matcher.compute_bitmask(), forbid=tokens.end_ids), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not allowed.size:
            return
        forced = matcher.compute_ff_tokens() or [int(allowed[0])]
        if not all(matcher.consume_token(token) for token in forced):
            return


def quote_literal(text: str) -> str:
    """Write a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _is_allowed(token: int, mask: bytes) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _unite(a: bytes, b: bytes) -> bytes:
    size = max(len(a), len(b))
    return (int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(size, "little")


def change_mask(mask: bytes, *, forbid: Iterable[int] = (), allow: Iterable[int] = ()) -> bytes:
    """Return a copy of `mask` that forbids and allows these tokens."""
    bits = bytearray(mask)
    for token in forbid:
        if token // 8 < len(bits):
            bits[token // 8] &= ~(1 << token % 8)
    for token in allow:
        if token // 8 >= len(bits):
            bits.extend(bytes(token // 8 + 1 - len(bits)))
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)
