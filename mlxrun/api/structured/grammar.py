"""Grammars of structured output, compiled by llguidance: JSON, schemas, regular expressions, choices, calls.

Compiling takes milliseconds, the first grammar of a model up to a second: call it on a worker thread. It
raises RequestError with llguidance's reason. The result is what Request.grammar takes.

llguidance recurs along its input, and a native stack that overflows ends the process. So llguidance is called
on a thread with a deep stack.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import llguidance
from cachetools import LRUCache
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from mlxrun.api.structured.grammar_checks import (
    MAX_CHARACTERS,
    check_choices,
    check_rules,
    check_schema_count,
    check_text,
)
from mlxrun.api.structured.matcher import (
    GrammarTokens,
    NumberDigits,
    ReasoningBounds,
    RowMatcher,
    get_error_reason,
    quote_literal,
    try_answer,
)
from mlxrun.api.structured.schema_encoding import encode_schema
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import reject, shorten
from mlxrun.core.workers import check_abandoned

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "ebnf"]

# How many compiled grammars are cached, and characters of their sources: a character costs 100 to 400 bytes,
# and what rows learn of a grammar stays with it, up to MAX_LEXER_STATES. 16 of the worst kind are 2 GB; most
# have 1 MB each.
MAX_CACHED, MAX_CACHED_CHARACTERS = 16, 1 << 20
# What limits the time of the first mask, and of each later one: some 100 ms, 15 ms and 3 ms.
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL, STEP_MAX_ITEMS = 200_000, 200_000, 50_000
MAX_LEXER_STATES = 50_000  # 0.6 to 2 kB each; a string takes one for each character of its maxLength
# llguidance takes 3 to 16 kB for each rule or `$ref` that leads to another, and the longest grammar that is
# compiled has some 60,000. It is address space; memory is used as far as the calls go.
STACK_BYTES = 512 << 20

T = TypeVar("T")
_stack_size_lock = threading.Lock()  # the size is a setting of the process


class GrammarError(Exception):
    """llguidance's reason for refusing a grammar."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar: a Grammar of core/request.py. `param`: the grammar's field, which errors of its
    rows name. `is_json`: whether an answer is JSON from its beginning, so that the digits of its numbers are
    bounded."""

    tokens: GrammarTokens
    source: str
    matcher: llguidance.LLMatcher  # at the start of the grammar; threads share it, so it is only ever copied
    reasoning: ReasoningBounds | None = None
    param: str | None = None
    is_json: bool = False

    def begin_after(self, reasoning: ReasoningBounds) -> CompiledGrammar:
        """Return the same grammar for an answer that begins with reasoning. It holds behind the reasoning."""
        return replace(self, reasoning=reasoning)

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> RowMatcher:
        """Make the matcher of a row that has these output tokens already. RequestError if they do not fit."""
        own, digits = self.matcher.deep_copy(), NumberDigits() if self.is_json else None
        matcher = RowMatcher(self.tokens, own, stop_ids, self.reasoning, self._make_row_error, digits)
        for token in output:
            matcher.accept(token)
        return matcher

    def _make_row_error(self, reason: str, spoilt: bool) -> RequestError:
        if spoilt:
            # Copies share a lexer: once it has come to its limits, every later row fails too. So the next
            # request compiles the grammar again.
            key = self.tokens, self.source, self.param
            with _cache_lock:
                cached = compiled_grammars.get(key)
                if cached is not None and cached.matcher is self.matcher:
                    del compiled_grammars[key]
        where = f"{self.param}: " if self.param else ""
        return RequestError(f"{where}the grammar {reason}", code="grammar_failed", param=self.param)


# A grammar counts as at least so many characters that no more than MAX_CACHED fit.
compiled_grammars: LRUCache[tuple[GrammarTokens, str, str | None], CompiledGrammar] = LRUCache(
    MAX_CACHED_CHARACTERS, lambda grammar: max(len(grammar.source), MAX_CACHED_CHARACTERS // MAX_CACHED)
)
_cache_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class CallPattern:
    """A call of one tool: JSON arguments that match `schema`, between two texts (see parsers/family.py).

    `param`: the schema's field, which errors name."""

    prefix: str
    schema: Mapping[str, Any] | bool
    suffix: str
    param: str


def compile_grammar(
    kind: GrammarKind, value: Any, model: ModelInfo, *, param: str, strict: bool = True
) -> CompiledGrammar:
    """Compile the grammar of one request. RequestError naming the field `param` if that is impossible.

    `value`: None (json_object), a JSON Schema, a text, or the strings to choose from. `strict`: refuse
    keywords of a schema that cannot be enforced; else they have no effect.
    """
    with _reject_errors(param):
        match kind:
            case "json_object":
                source = _write_json({"type": "object"}, strict, param)
            case "json_schema":
                source = _write_json(value, strict, param)
            case "regex":
                source = llguidance.LLMatcher.grammar_from_regex(check_text(value, param))
            case "choice":
                source = _write_choices(check_choices(value, param))
            case "lark":
                source = llguidance.LLMatcher.grammar_from_lark(check_text(value, param))
            case "ebnf":
                source = any_to_lark(check_rules(value, param))
        return _compile(source, model, param, is_json=kind.startswith("json"))


def compile_calls(
    patterns: Sequence[CallPattern],
    model: ModelInfo,
    *,
    param: str,
    separator: str | None = None,
    opener: str = "",
    strict: bool = False,
) -> CompiledGrammar:
    """Compile an answer that is a call of one of these patterns; or several, with `separator` between them.

    `opener`: the text with which all patterns begin. If given, the answer is any text, in which a call
    follows each opener. Raises as compile_grammar does.
    """
    check_schema_count((pattern.schema for pattern in patterns), param)
    tokens, rules = get_grammar_tokens(model), []
    for i, pattern in enumerate(patterns):
        parts = (
            tokens.write_literal(pattern.prefix.removeprefix(opener)),
            f"%json {encode_schema(pattern.schema, strict, pattern.param)}",
            tokens.write_literal(pattern.suffix),
        )
        rules.append(f"call{i}: {' '.join(filter(None, parts))}")
    calls = " | ".join(f"call{i}" for i in range(len(patterns)))
    if opener:
        start = _write_free_text(tokens, opener)
    elif separator is None:
        start = "start: call"
    else:
        start = f"start: call ({' '.join(filter(None, (tokens.write_literal(separator), 'call')))})*"
    try:
        with _reject_errors(param):
            source = "\n".join([start, f"call: {calls}", *rules])
            # A free text may have quotes without partners.
            return _compile(source, model, param, is_json=not opener)
    except RequestError:
        for pattern in patterns:  # names the schema if it is one of them by itself
            compile_grammar("json_schema", pattern.schema, model, param=pattern.param, strict=strict)
        raise


def _write_free_text(tokens: GrammarTokens, opener: str) -> str:
    """Any text, in which a call follows wherever the opener comes: a lazy lexeme ends as soon as it can."""
    if opener in tokens.special_ids:
        head = f"head: TEXT {tokens.write_literal(opener)}"
    else:
        head = f"head[lazy]: TEXT {quote_literal(opener)}"
    return f"start: (head call)* TEXT\n{head}\nTEXT: /(.|\\n)*/"


def get_grammar_tokens(model: ModelInfo) -> GrammarTokens:
    """Return the model's vocabulary as llguidance knows it. It is made once for each model."""
    with _tokens_lock:
        return _make_grammar_tokens(model.tokenizer.backend_tokenizer, model.eos_ids)


_tokens_lock = threading.Lock()


@functools.lru_cache(maxsize=8)
def _make_grammar_tokens(backend: Any, eos_ids: frozenset[int]) -> GrammarTokens:
    return GrammarTokens.from_tokenizer(backend, eos_ids)


# -- sources ----------------------------------------------------------------------------------------------


def _write_choices(choices: Sequence[str]) -> str:
    """One of these texts, as a single lexeme: alternatives of the parser are slower and limited in number."""
    texts = [quote_literal(text) for text in choices if text]
    lexeme = f"CHOICE: {' | '.join(texts)}" if texts else ""
    start = 'start: CHOICE | ""' if len(texts) < len(choices) else "start: CHOICE"
    return f"{start}\n{lexeme}" if texts else 'start: ""'


def _write_json(schema: Any, strict: bool, param: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(encode_schema(schema, strict, param))


# -- compiling --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reject_errors(param: str) -> Iterator[None]:
    """Turn llguidance's errors into errors of the field."""
    try:
        yield
    except (GrammarError, GbnfToLarkError) as error:
        reject(param, str(error), code="invalid_grammar")
    except RecursionError:
        reject(param, "is nested too deeply", code="invalid_grammar")
    except ValueError as error:  # lone surrogates, NaN
        reject(param, f"cannot be read: {shorten(str(error))}", code="invalid_grammar")


def _compile(source: str, model: ModelInfo, param: str, is_json: bool) -> CompiledGrammar:
    if len(source) > MAX_CHARACTERS:
        raise GrammarError(f"a grammar of {len(source)} characters; at most {MAX_CHARACTERS} are allowed")
    tokens = get_grammar_tokens(model)
    with _cache_lock:
        grammar = compiled_grammars.get((tokens, source, param))
    if grammar is None:
        check_abandoned()
        made = call_on_deep_stack(lambda: _compile_source(tokens, source))
        grammar = replace(made, param=param, is_json=is_json)
        with _cache_lock:
            compiled_grammars[tokens, source, param] = grammar
    return grammar


def _compile_source(tokens: GrammarTokens, source: str) -> CompiledGrammar:
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(tokens.tokenizer, source, log_level=0, limits=limits)
    probe = matcher.deep_copy()  # copies share what is learned of the grammar
    if not matcher.is_error():
        try_answer(probe, tokens)
    for each in (matcher, probe):
        if each.is_error():
            raise GrammarError(get_error_reason(each))
    return CompiledGrammar(tokens, source, matcher)


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """Call the function on a thread with a stack of STACK_BYTES. Blocks until it has returned or raised."""
    pool = ThreadPoolExecutor(1, "deep stack")
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            result = pool.submit(function)  # which starts the thread
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)  # the thread ends once it has returned
    return result.result()
