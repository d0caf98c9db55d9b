"""Structured output: JSON, schemas, regular expressions, choices, grammars and forced calls, by llguidance.

`compile_grammar` is slow (milliseconds; the first of a model up to a second): call it on a worker thread. It
raises RequestError with llguidance's reason. What it returns is what Request.grammar takes.
JSON may have one space wherever whitespace may be, and none around it: indentation costs tokens, and a small
model that may write line breaks can go on with them for long.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from mlxrun.structured.kept import Kept
from mlxrun.structured.matcher import GrammarTokens, ReasoningBounds, RowMatcher, quoted, reason
from mlxrun.structured.schema_keywords import check_schema
from mlxrun.text.field_errors import check_type, get_json_type, reject, shorten
from mlxrun.text.model_info import ModelInfo

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "ebnf"]

LARGEST = 1 << 20  # characters of a grammar
# Compiled grammars, and characters of their sources together: a character costs 100 to 400 bytes, and what
# rows learn of a grammar stays with it, up to STATES. 16 of the worst kind are 2 GB; most have 1 MB each.
KEPT, KEPT_CHARACTERS = 16, 1 << 20
WHITESPACE = " ?"
# What decides how long the first mask, and each later one, may take: some 100 ms, 15 ms and 3 ms.
FUEL, STEP_FUEL, STEP_ITEMS = 200_000, 200_000, 50_000
STATES = 50_000  # of a lexer; 0.6 to 2 kB each. A string takes one for each character of its maxLength


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar that is ready; see scheduler.request.Grammar. `warnings`: what a lenient schema asks for and
    does not get."""

    tokens: GrammarTokens
    source: str
    matcher: llguidance.LLMatcher  # has said nothing; is only ever copied, as threads share it
    warnings: tuple[str, ...] = ()
    thought: ReasoningBounds | None = None

    def after(self, thought: ReasoningBounds) -> CompiledGrammar:
        """The same for an answer that thinks first: the grammar begins once the thought has ended."""
        return replace(self, thought=thought)

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> RowMatcher:
        """A new row's constraint, after the tokens that it has said already."""
        own = self.matcher.deep_copy()
        constraint = RowMatcher(self.tokens, own, stop_ids, self.thought, self._forget)
        for token in output:
            constraint.accept(token)
        return constraint

    def _forget(self) -> None:
        """Copies share a lexer: one that has come to its limits fails every later row too. The next request
        has it compiled anew."""
        kept = _kept.get((self.tokens, self.source))
        if kept is not None and kept.matcher is self.matcher:
            _kept.drop((self.tokens, self.source))


@dataclass(frozen=True, slots=True)
class CallFrame:
    """A call of one tool: its arguments, JSON of that schema, between two texts (see parsers.family)."""

    prefix: str
    schema: Mapping[str, Any] | bool
    suffix: str


def compile_grammar(
    of: Kind, value: Any, host: ModelInfo, *, param: str, strict: bool = True
) -> CompiledGrammar:
    """The grammar of one request. `param`: the field that errors name.

    `value`: nothing (json_object), a JSON Schema, a text, or the strings to choose from. `strict`: refuse
    keywords of a schema that cannot be enforced; else they are in `warnings`.
    """
    with _readable(param):
        match of:
            case "json_object":
                source = _json({"type": "object"}, strict, param)
            case "json_schema":
                source = _json(value, strict, param)
            case "regex":
                source = llguidance.LLMatcher.grammar_from_regex(_text(value, param))
            case "choice":
                source = f"start: {' | '.join(quoted(text) for text in _strings(value, param))}"
            case "lark":
                source = llguidance.LLMatcher.grammar_from_lark(_text(value, param))
            case "ebnf":
                source = any_to_lark(_text(value, param))
        return _compile(source, host)


def compile_calls(
    frames: Sequence[CallFrame],
    host: ModelInfo,
    *,
    param: str,
    between: str | None = None,
    opener: str = "",
    strict: bool = False,
) -> CompiledGrammar:
    """An answer that is a call of one of these frames; or several, with the text `between` them.

    `opener`: what all frames begin with. Given, the answer is any text, and calls are what may follow that.
    """
    tokens, rules = tokens_of(host), []
    for i, frame in enumerate(frames):
        parts = (
            tokens.literal(frame.prefix.removeprefix(opener)),
            _inline(frame.schema, strict, param),
            tokens.literal(frame.suffix),
        )
        rules.append(f"call{i}: {' '.join(filter(None, parts))}")
    calls = " | ".join(f"call{i}" for i in range(len(frames)))
    start = [_free(tokens, opener)] if opener else [f"start: call{_again(tokens, between)}"]
    with _readable(param):
        return _compile("\n".join([*start, f"call: {calls}", *rules]), host)


def _again(tokens: GrammarTokens, between: str | None) -> str:
    return "" if between is None else f" ({tokens.literal(between)} call)*".replace("( ", "(")


def _free(tokens: GrammarTokens, opener: str) -> str:
    """Any text, in which a call follows wherever the opener comes: a lazy lexeme ends as soon as it can."""
    if opener in tokens.special:
        head = f"head: TEXT {tokens.literal(opener)}"
    else:
        head = f"head[lazy]: TEXT {quoted(opener)}"
    return f"start: (head call)* TEXT\n{head}\nTEXT: /(.|\\n)*/"


def tokens_of(host: ModelInfo) -> GrammarTokens:
    """What llguidance knows of the model's tokenizer; made once a model."""
    with _making:
        return _tokens(host.tokenizer.backend_tokenizer, host.eos_ids)


_making = threading.Lock()


@functools.lru_cache(maxsize=8)
def _tokens(backend: Any, eos_ids: frozenset[int]) -> GrammarTokens:
    return GrammarTokens.make(backend, eos_ids)


# -- sources ----------------------------------------------------------------------------------------------


def _json(schema: Any, strict: bool, param: str) -> str:
    if not isinstance(schema, bool):
        check_type(schema, dict, param)
    return llguidance.LLMatcher.grammar_from_json_schema(_inline_schema(schema, strict, param))


def _inline(schema: Mapping[str, Any] | bool, strict: bool, param: str) -> str:
    return f"%json {_inline_schema(schema, strict, param)}"


def _inline_schema(schema: Any, strict: bool, param: str) -> str:
    """The schema as llguidance takes it, its options within; ours come before what the schema itself says."""
    _check_size(schema, param)
    check_schema(schema, param, strict)
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": False}
    whole = {"allOf": [schema]} if isinstance(schema, bool) else dict(schema)
    return json.dumps(whole | {"x-guidance": options})


def _check_size(schema: Any, param: str) -> None:
    """Before anything looks into it: jsonschema takes minutes for one of many megabytes."""
    try:
        _check_length(len(json.dumps(schema)), param)
    except RecursionError as error:
        reject(param, "is nested too deeply")


def _check_length(length: int, param: str) -> None:
    if length > LARGEST:
        reject(param, f"has {length} characters; at most {LARGEST} are taken", code="invalid_grammar")


def _text(value: Any, param: str) -> str:
    text: str = check_type(value, str, param)
    _check_length(len(text), param)
    if not text.strip():
        reject(param, "is empty")
    return text


def _strings(value: Any, param: str) -> list[str]:
    check_type(value, list, param)
    if not value:
        reject(param, "is empty; give at least one string to choose")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            reject(f"{param}[{i}]", f"expected string, got {get_json_type(text)}", code="invalid_type")
    return list(dict.fromkeys(value))


# -- compiling --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _readable(param: str) -> Iterator[None]:
    """What llguidance refuses, as an error of the field."""
    try:
        yield
    except (GrammarError, GbnfToLarkError) as error:
        reject(param, str(error), code="invalid_grammar")
    except ValueError as error:  # lone surrogates, NaN
        reject(param, f"cannot be read: {shorten(str(error))}", code="invalid_grammar")


def _compile(source: str, host: ModelInfo) -> CompiledGrammar:
    if len(source) > LARGEST:
        raise GrammarError(f"a grammar of {len(source)} characters; at most {LARGEST} are taken")
    tokens = tokens_of(host)
    found = _kept.get((tokens, source))
    if found is None:
        found = _compiled(tokens, source)
        _kept.put((tokens, source), found, len(source))
    return found


class GrammarError(Exception):
    """llguidance's reason for refusing a grammar."""


_kept: Kept[CompiledGrammar] = Kept(KEPT, KEPT_CHARACTERS)


def _compiled(tokens: GrammarTokens, source: str) -> CompiledGrammar:
    """Copies of its matcher share what is learned of the grammar."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=STATES,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(tokens.tokenizer, source, log_level=0, limits=limits)
    first = matcher.deep_copy()
    if not matcher.is_error():
        first.compute_bitmask()  # the slowest mask, and the place where much is found out
    for each in (matcher, first):
        if each.is_error():
            raise GrammarError(reason(each))
    return CompiledGrammar(tokens, source, matcher, tuple(matcher.get_grammar_warnings()))
