"""`thinking_budget`: reasoning that has had so many tokens is closed as the model's own format closes it.

To the engine it is a Grammar of core/request.py. It allows what the request's own grammar allows, until open
reasoning has used up its tokens. Then it allows only the text that closes the reasoning, and then all again.
Tokens count over all reasoning of an answer, without the tags. Rows run on the engine thread.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.parsers.family import ReasoningFamily
from mlxrun.api.structured.grammar import get_grammar_tokens
from mlxrun.api.structured.matcher import GrammarTokens, change_mask
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import check_type, reject, reject_unsupported
from mlxrun.core.request import Grammar, GrammarMatcher

Pairs = tuple[tuple[bytes, tuple[bytes, ...]], ...]
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True, eq=False)
class ThinkingBudget:
    """The grammar of an answer with at most `max_tokens` tokens of reasoning."""

    tokens: GrammarTokens
    max_tokens: int
    pairs: Pairs
    """Opening tags of reasoning, each with the tags that may close it."""
    anywhere: bool
    """Whether reasoning may begin in the middle of text."""
    opened: bool
    """Whether the prompt ends within reasoning."""
    closings: Mapping[bytes, tuple[int, ...]]
    """The tokens to write behind reasoning that ends with a text; the longest text counts."""
    inner: Grammar | None = None
    """The request's own grammar."""
    continuation: bytes = b""
    """The beginning of the answer, if the prompt has it; reasoning in it does not count."""

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> GrammarMatcher:
        """Make the matcher of a row that has these output tokens already."""
        inner = self.inner.start((), stop_ids) if self.inner is not None else None
        matcher = _BudgetMatcher(self, stop_ids, inner)
        for token in output:
            matcher.accept(token)
        return matcher


def read_thinking_budget(given: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the budget in tokens that a checked chat body sets, and its field. RequestError if it has two.

    The field is ours, vLLM's, or the template variable that clients of Qwen send."""
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


def build_thinking_budget(
    max_tokens: int,
    reasoning: ReasoningFamily | None,
    prompt: str,
    model: ModelInfo,
    inner: Grammar | None = None,
    *,
    param: str = "thinking_budget",
) -> ThinkingBudget:
    """Build the grammar of answers to the rendered `prompt` with at most `max_tokens` tokens of reasoning.
    `inner`: the request's own grammar. RequestError naming `param` if the model's format is not known."""
    if reasoning is None:
        reject_unsupported(param, "this model's format of reasoning is not known")
    tokens = get_grammar_tokens(model)
    closers = [closer for _, some in reasoning.pairs for closer in some if closer in reasoning.closing]
    if not closers:
        reject_unsupported(param, "how this model ends its reasoning is not known")
    return ThinkingBudget(
        tokens=tokens,
        max_tokens=max_tokens,
        pairs=tuple((a.encode(), tuple(b.encode() for b in some)) for a, some in reasoning.pairs),
        anywhere=reasoning.anywhere,
        opened=reasoning.is_opened_by(prompt),
        closings=_tokenize_closings(reasoning.closing, closers[0], tokens, param),
        inner=inner,
    )


def _tokenize_closings(
    closing: str, closer: str, tokens: GrammarTokens, param: str
) -> dict[bytes, tuple[int, ...]]:
    """Tokenize the closing text: complete, without the line break that the reasoning ends with already, and
    what is left of it where the model has begun to write the closing tag itself."""
    texts = {"": closing}
    if closing.startswith("\n"):
        texts["\n"] = closing[1:]
    rest = closing[closing.index(closer) :]
    texts |= {closer[:size]: rest[size:] for size in range(1, len(closer))}
    closings = {}
    for before, text in texts.items():
        ids = tuple(tokens.tokenizer.tokenize_str(text, parse_special=True))
        if tokens.tokenizer.decode_bytes(list(ids)) == text.encode():
            closings[before.encode()] = ids
    if b"" not in closings:
        reject_unsupported(param, "the tokenizer has no tokens for the end of reasoning")
    return closings


class _BudgetMatcher:
    """The state of one row: a GrammarMatcher of core/request.py."""

    def __init__(
        self, budget: ThinkingBudget, stop_ids: frozenset[int], inner: GrammarMatcher | None
    ) -> None:
        self._budget = budget
        self._inner = inner
        # Outside of reasoning: the text since the last, while it may begin another; else the newest bytes.
        self._text = b""
        self._fresh = True  # no text since the start or the last reasoning
        self._closers: tuple[bytes, ...] = ()  # of open reasoning
        self._used = 0
        self._due: tuple[int, ...] = ()  # tokens of the closing text that must come now
        self._longest = max(len(tag) for opener, closers in budget.pairs for tag in (opener, *closers))
        self._free_mask = change_mask(budget.tokens.full_mask, allow=stop_ids)
        if budget.opened:
            self._closers = budget.pairs[0][1]
        if budget.continuation:
            self._read(budget.continuation)
        self._check_budget()

    @property
    def done(self) -> bool:
        """Whether only a stop token may follow."""
        return not self._due and self._inner is not None and self._inner.done

    def mask(self) -> bytes:
        """Return the tokens that may follow, as a bit mask."""
        if self._due:
            return change_mask(b"", allow=self._due[:1])
        return self._free_mask if self._inner is None else self._inner.mask()

    def accept(self, token: int) -> None:
        """Take in a token. Raises RequestError if it is not the one that must come."""
        if self._inner is not None:
            self._inner.accept(token)
        if self._due:
            if token != self._due[0]:
                reason = f"token {token} where the reasoning must end with {self._due[0]}"
                raise RequestError(f"thinking_budget: {reason}", code="grammar_failed")
            self._due = self._due[1:]
        reasoning = bool(self._closers)
        self._read(self._budget.tokens.tokenizer.decode_bytes([token]))
        if reasoning and self._closers:
            self._used += 1
        self._check_budget()

    def fork(self) -> _BudgetMatcher:
        """Make an independent copy."""
        made = copy.copy(self)
        made._inner = None if self._inner is None else self._inner.fork()
        return made

    def _read(self, text: bytes) -> None:
        """Follow the text in and out of reasoning."""
        text = self._text + text
        while True:
            self._text = text
            found = _find_first(text, self._closers) if self._closers else self._find_opener()
            if found is None:
                break
            at, tag = found
            self._closers = () if self._closers else dict(self._budget.pairs)[tag]
            self._fresh = True
            text = text[at + len(tag) :]
        if self._closers or not self._fresh:
            self._text = self._text[-self._longest :]

    def _find_opener(self) -> tuple[int, bytes] | None:
        """Return where reasoning begins in the text outside, and its opening tag."""
        openers = [opener for opener, _ in self._budget.pairs]
        if self._budget.anywhere:
            self._fresh = False
            return _find_first(self._text, openers)
        start = self._text.lstrip(_SPACE) if self._fresh else b"-"
        found = next((opener for opener in openers if start.startswith(opener)), None)
        if found is not None:
            return len(self._text) - len(start), found
        if not any(opener.startswith(start) for opener in openers):
            self._fresh = False
        return None

    def _check_budget(self) -> None:
        """Make the closing text due if open reasoning has had its tokens, but not within a character."""
        exhausted = self._used >= self._budget.max_tokens
        if self._closers and not self._due and exhausted and not _ends_within_character(self._text):
            closings = self._budget.closings
            self._due = closings[max((end for end in closings if self._text.endswith(end)), key=len)]


def _find_first(text: bytes, tags: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return where the first of the tags in the text is, and which."""
    found = [(text.find(tag), tag) for tag in tags if tag in text]
    return min(found, key=lambda each: each[0]) if found else None


def _ends_within_character(text: bytes) -> bool:
    """Whether UTF-8 ends in the middle of a character."""
    for size in range(1, min(len(text), 3) + 1):
        byte = text[-size]
        if byte >= 0xC0:
            return size < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
