"""`thinking_budget`: a thought that has had so many tokens is closed, in the model's own way.

To the engine it is a grammar (scheduler.request.Grammar): it allows all that the request's own grammar does,
if there is one, until the tokens of an open thought are used up, then only the text that closes it, then
again all. Tokens count over all thoughts of an answer, without the tags. Rows run on the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.errors import RequestError
from mlxrun.parsers.family import ReasoningFamily
from mlxrun.scheduler.request import Grammar, GrammarMatcher
from mlxrun.structured.grammar import tokens_of
from mlxrun.structured.matcher import GrammarTokens
from mlxrun.text.field_errors import check_type, reject, reject_unsupported
from mlxrun.text.model_info import ModelInfo

Pairs = tuple[tuple[bytes, tuple[bytes, ...]], ...]
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True, eq=False)
class ThinkingBudget:
    """See scheduler.request.Grammar. `most`: tokens of thoughts; `open`: the prompt ends within one."""

    tokens: GrammarTokens
    most: int
    pairs: Pairs
    anywhere: bool
    open: bool
    closings: Mapping[bytes, tuple[int, ...]]
    """What to write behind a thought that ends so; the longest ending counts."""
    inner: Grammar | None = None
    prefill: bytes = b""
    """The text that the answer goes on from: its thoughts are thoughts, but cost nothing."""

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> GrammarMatcher:
        """A row after the tokens that it has said already."""
        inner = self.inner.start((), stop_ids) if self.inner is not None else None
        row = _BudgetMatcher(self, stop_ids, inner)
        for token in output:
            row.accept(token)
        return row


def asked(given: Mapping[str, Any]) -> tuple[int, str] | None:
    """The budget that a checked chat body asks for, and the field that does: ours, vLLM's, or that of Qwen's
    clients, who have it among the template's variables. An error if two of them ask."""
    found = [(given[name], name) for name in ("thinking_budget", "thinking_token_budget") if name in given]
    inner = given.get("chat_template_kwargs", {}).get("thinking_budget")
    if inner is not None:
        param = "chat_template_kwargs.thinking_budget"
        if check_type(inner, int, param) < 0:
            reject(param, "must not be negative")
        found.append((inner, param))
    if len(found) > 1:
        reject(found[1][1], f"not together with {found[0][1]}: an answer has one budget")
    return found[0] if found else None


def budget_of(
    most: int,
    reasoning: ReasoningFamily | None,
    prompt: str,
    host: ModelInfo,
    inner: Grammar | None = None,
    *,
    param: str = "thinking_budget",
) -> ThinkingBudget:
    """A grammar for answers to the rendered `prompt` whose thoughts have at most `most` tokens (0: none).

    `inner`: the request's own grammar. RequestError naming `param` if thoughts of this model are not known.
    """
    if reasoning is None:
        reject_unsupported(param, "this model has no format of thoughts that is known")
    tokens = tokens_of(host)
    ends = [end for _, ends in reasoning.pairs for end in ends if end in reasoning.closing]
    if not ends:
        reject_unsupported(param, "how this model ends a thought is not known")
    return ThinkingBudget(
        tokens=tokens,
        most=most,
        pairs=tuple((a.encode(), tuple(b.encode() for b in ends)) for a, ends in reasoning.pairs),
        anywhere=reasoning.anywhere,
        open=reasoning.is_opened_by(prompt),
        closings=_closings(reasoning.closing, ends[0], tokens, param),
        inner=inner,
    )


def _closings(closing: str, end: str, tokens: GrammarTokens, param: str) -> dict[bytes, tuple[int, ...]]:
    """The closing text in tokens: whole, without the line break that the thought ends with already, and what
    is left of it where the model has begun to close the thought itself."""
    texts = {"": closing}
    if closing.startswith("\n"):
        texts["\n"] = closing[1:]
    rest = closing[closing.index(end) :]
    texts |= {end[:size]: rest[size:] for size in range(1, len(end))}
    made = {}
    for before, text in texts.items():
        ids = tuple(tokens.tokenizer.tokenize_str(text, parse_special=True))
        if tokens.tokenizer.decode_bytes(list(ids)) == text.encode():
            made[before.encode()] = ids
    if b"" not in made:
        reject_unsupported(param, "the tokenizer has no tokens for the end of a thought")
    return made


class _BudgetMatcher:
    """See scheduler.request.Constraint."""

    def __init__(
        self, budget: ThinkingBudget, stop_ids: frozenset[int], inner: GrammarMatcher | None
    ) -> None:
        self._budget = budget
        self._inner = inner
        # Outside: the text since the last thought while it may begin another, else its last bytes.
        self._text = b""
        self._fresh = True  # no text since the start or the last thought
        self._ends: tuple[bytes, ...] = ()  # of the thought that is open
        self._used = 0
        self._due: tuple[int, ...] = ()  # of the closing text
        self._reach = max(len(mark) for opener, ends in budget.pairs for mark in (opener, *ends))
        self._free = _with(budget.tokens.everything, stop_ids)
        if budget.open:
            self._ends = budget.pairs[0][1]
        if budget.prefill:
            self._read(budget.prefill)
        self._check()

    @property
    def done(self) -> bool:
        """Whether nothing but a stop token may follow."""
        return not self._due and self._inner is not None and self._inner.done

    def mask(self) -> bytes:
        """The tokens that may follow."""
        if self._due:
            return _with(b"", self._due[:1])
        return self._free if self._inner is None else self._inner.mask()

    def accept(self, token: int) -> None:
        """Take a token in."""
        if self._inner is not None:
            self._inner.accept(token)
        if self._due:
            if token != self._due[0]:
                reason = f"token {token} where the thought must end with {self._due[0]}"
                raise RequestError(f"thinking_budget: {reason}", code="grammar_failed")
            self._due = self._due[1:]
        thinking = bool(self._ends)
        self._read(self._budget.tokens.tokenizer.decode_bytes([token]))
        if thinking and self._ends:
            self._used += 1
        self._check()

    def _read(self, text: bytes) -> None:
        """Follow the text in and out of thoughts."""
        text = self._text + text
        while True:
            self._text = text
            found = _first(text, self._ends) if self._ends else self._opener()
            if found is None:
                break
            at, mark = found
            self._ends = () if self._ends else dict(self._budget.pairs)[mark]
            self._fresh = True
            text = text[at + len(mark) :]
        if self._ends or not self._fresh:
            self._text = self._text[-self._reach :]

    def _opener(self) -> tuple[int, bytes] | None:
        """Where a thought begins in the text outside, and with what."""
        openers = [opener for opener, _ in self._budget.pairs]
        if self._budget.anywhere:
            self._fresh = False
            return _first(self._text, openers)
        begun = self._text.lstrip(_SPACE) if self._fresh else b"-"
        found = next((opener for opener in openers if begun.startswith(opener)), None)
        if found is not None:
            return len(self._text) - len(begun), found
        if not any(opener.startswith(begun) for opener in openers):
            self._fresh = False
        return None

    def _check(self) -> None:
        """Whether the open thought has had its tokens: then its end is due, but not within a character."""
        if not self._ends or self._due or self._used < self._budget.most or _torn(self._text):
            return
        closings = self._budget.closings
        self._due = closings[max((end for end in closings if self._text.endswith(end)), key=len)]


def _first(text: bytes, marks: Sequence[bytes]) -> tuple[int, bytes] | None:
    """The mark that comes first in the text, and where."""
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(found, key=lambda each: each[0]) if found else None


def _torn(text: bytes) -> bool:
    """Whether UTF-8 ends in the middle of a character."""
    for size in range(1, min(len(text), 3) + 1):
        byte = text[-size]
        if byte >= 0xC0:
            return size < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def _with(mask: bytes, tokens: Sequence[int] | frozenset[int]) -> bytes:
    """A mask that allows these tokens too."""
    bits = bytearray(mask.ljust(max((t // 8 + 1 for t in tokens), default=0), b"\0"))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)
