"""Compiled grammars: which tokens may follow, what is refused and how."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cachetools import LRUCache

from benchmarks.tiny import byte_tokenizer
from benchmarks.tiny.byte_tokenizer import TOKEN_ID
from mlxrun.api.structured import grammar, grammar_checks, schema_encoding
from mlxrun.api.structured.grammar import CallPattern, CompiledGrammar, compile_calls, compile_grammar
from mlxrun.api.structured.matcher import MAX_GAP, GrammarTokens, ReasoningBounds
from mlxrun.core.errors import RequestError
from mlxrun.core.request import GrammarMatcher
from mlxrun.core.workers import Lane
from tests.helpers.schema_cases import PERSON

# Tokens of more than a byte, as real vocabularies have them; the special ones come behind them.
TEXTS = ["</th", "ink>", 'ink>\n{"', "ink>  ", "\n\n", '{"', "ink>no"]
LONG = {text: 256 + i for i, text in enumerate(TEXTS)}
IDS = {text: i + len(LONG) for text, i in TOKEN_ID.items()}
SIZE = 300 + len(LONG)
EOS, OTHER = IDS["<|im_end|>"], IDS["<|unused_3|>"]
THINK, UNTHINK, CALL, UNCALL = (IDS[t] for t in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
STOP = frozenset({EOS})


Cache = LRUCache[tuple[GrammarTokens, str, str | None], CompiledGrammar]


@pytest.fixture
def cache() -> Iterator[Cache]:
    """The cache of compiled grammars, empty before and after."""
    grammar.compiled_grammars.clear()
    yield grammar.compiled_grammars
    grammar.compiled_grammars.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bytes, special tokens, and the tokens of LONG."""
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save_tokenizer(folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    data["model"]["vocab"] |= {split(text)[0][0]: i for text, i in LONG.items()}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)))
    assert made.convert_tokens_to_ids("<think>") == THINK and len(made) == SIZE
    return SimpleNamespace(tokenizer=made, eos_ids=STOP)


def make(model: Any, kind: Any, value: Any = None, **options: Any) -> CompiledGrammar:
    return compile_grammar(kind, value, model, param="field", **options)


def open_to(constraint: GrammarMatcher) -> set[int | str]:
    """Return what may follow: bytes as characters, other tokens as ids."""
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    return {chr(i) if i < 256 else int(i) for i in np.flatnonzero(bits)}


def say(constraint: GrammarMatcher, tokens: Iterable[int]) -> GrammarMatcher:
    """Accept the tokens, each of which the mask must allow."""
    for token in tokens:
        assert constraint.mask()[token // 8] >> token % 8 & 1, token
        constraint.accept(token)
    return constraint


# -- stop tokens ------------------------------------------------------------------------------------------


def test_a_stop_token_comes_where_the_answer_is_complete_and_only_there(model: Any) -> None:
    row = make(model, "regex", "ab*").start((), STOP)
    assert open_to(row) == {"a"}
    assert open_to(say(row, b"a")) == {"b", EOS}
    assert not row.done
    say(row, [EOS])
    assert row.done and open_to(row) == {EOS}


def test_a_complete_answer_leaves_the_stop_tokens_alone(model: Any) -> None:
    row = say(make(model, "choice", ["yes", "no"]).start((), frozenset({EOS, OTHER})), b"yes")
    assert row.done and open_to(row) == {EOS, OTHER}


def test_stop_tokens_are_the_requests_own(model: Any) -> None:
    """ignore_eos: the model's own end is no token of the answer; a stop id may be any token, a letter too."""
    assert open_to(say(make(model, "regex", "a+").start((), frozenset()), b"a")) == {"a"}
    assert open_to(make(model, "regex", "[ab]c").start((), frozenset({ord("b")}))) == {"a"}
    far = frozenset({5000})
    assert open_to(say(make(model, "regex", "a").start((), far), b"a")) == {5000}


def test_earlier_output_is_replayed(model: Any) -> None:
    made = make(model, "json_schema", PERSON)
    first, again = made.start((), STOP), made.start(b'{"name":"x",', STOP)
    say(first, b'{"name":"x",')
    assert first.mask() == again.mask()
    with pytest.raises(RequestError, match="does not allow token 120"):
        made.start(b"x", STOP)


def test_an_end_that_comes_too_early_fails_the_row(model: Any) -> None:
    """A stop token that the mask does not allow fails the row."""
    with pytest.raises(RequestError, match=f"does not allow token {EOS}"):
        make(model, "regex", "ab").start((), STOP).accept(EOS)


def test_rows_of_one_grammar_are_independent(model: Any) -> None:
    made = make(model, "regex", "[ab]c")
    one, other = made.start((), STOP), made.start((), STOP)
    say(one, b"a")
    with pytest.raises(RequestError):
        one.accept(ord("a"))
    assert open_to(other) == {"a", "b"}
    assert open_to(made.start((), STOP)) == {"a", "b"}


# -- JSON -------------------------------------------------------------------------------------------------


def test_whitespace_is_bounded(model: Any) -> None:
    """A model that only writes white space would not end, so at most one space is allowed."""
    row = make(model, "json_schema", PERSON).start((), STOP)
    assert open_to(row) == {"{", LONG['{"']}
    say(row, b"{")
    assert open_to(row) >= {" ", '"'} and "\n" not in open_to(row)
    row = make(model, "json_schema", PERSON).start(b"{ ", STOP)
    assert open_to(row) == {'"'}


def test_a_schema_cannot_change_how_it_is_compiled(model: Any) -> None:
    """A schema that asks llguidance for leniency or free white space by `x-guidance` does not get it."""
    loose = {
        "x-guidance": {"lenient": True, "whitespace_pattern": " *"},
        "type": "array",
        "items": {"not": {}},
    }
    with pytest.raises(RequestError, match='Unimplemented keys: \\["not"\\]'):
        make(model, "json_schema", loose)
    row = make(model, "json_schema", loose | {"items": {"type": "null"}}).start(b"[ ", STOP)
    assert " " not in open_to(row)


def test_a_schema_that_is_not_strict_may_have_what_is_not_enforced(model: Any) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(RequestError, match="uniqueItems"):
        make(model, "json_schema", schema)
    lenient = make(model, "json_schema", schema, strict=False)
    assert lenient.matcher.get_grammar_warnings() == ['Unimplemented keys: ["uniqueItems"]']
    assert not make(model, "json_schema", {"nonsense": 1}, strict=False).matcher.get_grammar_warnings()


# -- refusals ---------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str, str]] = [
    ("regex", "(a", "field", "unclosed group"),
    ("regex", "a(?=b)", "field", "look-around"),
    ("regex", "", "field", "is empty"),
    ("regex", 5, "field", "expected string, got integer"),
    ("regex", r"[^\s\S]", "field", "no text matches it"),
    ("regex", "a\ud800", "field", "surrogates not allowed"),
    ("choice", [], "field", "is empty"),
    ("choice", "a", "field", "expected array"),
    ("choice", ["a", 1], "field[1]", "expected string, got integer"),
    ("choice", ["x" * (1 << 20)], "field", "at most 1048576"),
    ("regex", "x" * (1 << 20) + "x", "field", "at most 1048576"),
    ("ebnf", "x" * (1 << 20) + "x", "field", "at most 1048576"),
    ("json_schema", {"enum": ["x" * (1 << 20)]}, "field", "at most 1048576"),
    ("choice", ["\ud800"], "field", "not JSON serializable"),
    ("lark", "start: foo", "field", '^field: unknown name: "foo"$'),
    ("regex", "(a", "field", r'^field: invalid regex "\(a": unclosed group$'),
    ("lark", "start: <[99999]>", "field", "out of range|too large"),
    ("ebnf", "root ::= ::", "field", "Expected name at line 1"),
    ("ebnf", 'x ::= "a"\n' * (grammar_checks.MAX_EBNF_RULES + 1), "field", "has 1001 rules; at most 1000"),
    ("ebnf", f'root ::= "{"a" * 70_000}"', "field", "at most 65536 are allowed in EBNF"),
    ("ebnf", "\n" * 1_000_000 + "x", "field", "Expected ::= at line 1"),  # not searched for ages
    ("ebnf", f'root ::= {"(" * 5_000}"a"{")" * 5_000}', "field", "is nested too deeply"),
    ("json_schema", 5, "field", "expected object"),
    ("json_schema", {"not": {"type": "null"}}, "field", "not"),
    ("json_schema", {"if": {"type": "null"}}, "field", "if"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "field", "oneOf"),
    ("json_schema", {"$ref": "http://elsewhere/schema"}, "field", "retrieving it failed"),
    ("json_schema", {"$ref": "#"}, "field", "no text matches it"),
    ("json_schema", {"type": "string", "format": "colour"}, "field", "Unknown format: colour"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "field", "Unsatisfiable"),
    ("json_schema", False, "field", "Unsatisfiable"),
    ("json_schema", {"const": float("nan")}, "field", "expected value"),
]


@pytest.mark.parametrize(("kind", "value", "param", "reason"), REFUSED)
def test_errors_name_the_field_and_the_reason(
    model: Any, kind: str, value: Any, param: str, reason: str
) -> None:
    """A 400 that names the field and gives llguidance's reason."""
    with pytest.raises(RequestError, match=reason) as caught:
        make(model, kind, value)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def chain_rules(count: int) -> str:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "b"'


def chain_references(count: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"const": "b"}}}


DEEP: list[tuple[str, Any, str]] = [
    ("lark", chain_rules(4_000), "aaa"),
    ("lark", f"start: %json {json.dumps(chain_references(4_000))}", '"b"'),
    ("json_schema", chain_references(4_000), '"b"'),
]


@pytest.mark.parametrize(("kind", "value", "text"), DEEP, ids=range(len(DEEP)))
def test_long_chains_of_rules_do_not_end_the_process(model: Any, kind: str, value: Any, text: str) -> None:
    """On the stack of an ordinary thread llguidance overflows at some 2,500 rules, or 500 references."""
    row = make(model, kind, value).start((), STOP)
    for token in model.tokenizer.encode(text, add_special_tokens=False):
        row.accept(token)


def make_optional(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, **more}


LARGE: list[tuple[str, Any, str]] = [
    ("json_schema", make_optional(500), "too many alternatives"),
    ("json_schema", make_optional(1, required=["p0"], properties={"p0": make_optional(500)}), "too many alt"),
    ("json_schema", {"type": "array", "minItems": 1, "items": make_optional(500)}, "too many alternatives"),
    ("json_schema", {"enum": [f"{i:06}" for i in range(70_000)]}, "too large or too complex"),
    ("regex", "x" * 1_000_000, "too large or too complex"),
    ("choice", ["x" * 400_000], "too large or too complex"),
    ("choice", [f"{i}" for i in range(grammar_checks.MAX_CHOICES + 1)], "has 20001 strings; at most 20000"),
    ("lark", "start: " + " | ".join(f'"{i}"' for i in range(66_000)), "the grammar library failed on it"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), LARGE, ids=range(len(LARGE)))
def test_what_is_too_large_is_refused_in_plain_words(model: Any, kind: str, value: Any, reason: str) -> None:
    """When it is compiled, not amid an answer, and without a backtrace or words of the library."""
    with pytest.raises(RequestError, match=f"^field: .*{reason}") as caught:
        make(model, kind, value)
    assert (caught.value.param, caught.value.code) == ("field", "invalid_grammar")
    message = str(caught.value).lower()
    assert len(message) < 200 and "\n" not in message
    for word in ("panic", "backtrace", "/", "row", "lexer", "parser", "recursive", "expressions constructed"):
        assert word not in message


def test_schemas_of_many_properties_are_accepted(model: Any) -> None:
    """The counterpart: 300 optional ones, and 1000 of which all are required."""
    for schema in (make_optional(300), make_optional(1000, required=[f"p{i}" for i in range(1000)])):
        assert '"' in open_to(say(make(model, "json_schema", schema).start((), STOP), b"{"))


def test_what_shows_up_in_an_answer_names_the_field(model: Any, cache: Cache) -> None:
    """A schema that an answer of free text enters late; another request's field is its own."""
    deep = make_optional(500)
    for _ in range(6):
        deep = make_optional(1, required=["p0"], properties={"p0": deep})
    row = compile_calls([CallPattern("f(", deep, ")", "tools[0]")], model, param="tools", opener="f(").start(
        (), STOP
    )
    with pytest.raises(RequestError, match="^tools: the grammar .* too many alternatives") as caught:
        say(row, b"Hm. f(" + b'{"p0":' * 7)
    assert (caught.value.param, caught.value.code) == ("tools", "grammar_failed")
    for param in ("guided_regex", "structured_outputs.regex"):
        with pytest.raises(RequestError, match=f"^{param}: the grammar does not allow token 120") as caught:
            compile_grammar("regex", "ab", model, param=param).start(b"x", STOP)
        assert caught.value.param == param


@pytest.mark.parametrize(
    "choices", [["yes", "yesno", "no"], ["", "a"], [""], ['"', "\\", "/a\n|b/", "\u0159"]]
)
def test_an_answer_is_one_of_the_choices_and_nothing_else(model: Any, choices: list[str]) -> None:
    made = make(model, "choice", choices)
    found, open_texts = set(), [b""]
    while open_texts:
        text = open_texts.pop()
        row = say(made.start((), STOP), text)
        bits = np.unpackbits(np.frombuffer(row.mask(), np.uint8), bitorder="little")
        found |= {text.decode()} if bits[EOS] else set()
        open_texts += [text + bytes([int(i)]) for i in np.flatnonzero(bits[:256])]
    assert found == set(choices)


def test_many_choices_are_accepted(model: Any) -> None:
    """More than the parser has alternatives for."""
    row = make(model, "choice", [f"{i:05}" for i in range(grammar_checks.MAX_CHOICES)]).start((), STOP)
    assert open_to(say(row, b"1999")) == set("0123456789")
    assert open_to(say(row, b"9")) == {EOS}


def test_a_schema_that_is_nested_too_deeply(model: Any) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        make(model, "json_schema", schema)


def test_compiled_grammars_are_cached_and_their_number_is_bounded(model: Any, cache: Cache) -> None:
    """A new one evicts the least recently used one."""
    made = [make(model, "regex", f"k{i}") for i in range(grammar.MAX_CACHED)]
    assert make(model, "regex", "k0") is made[0]
    make(model, "regex", "more")
    assert len(cache) == grammar.MAX_CACHED
    assert [make(model, "regex", f"k{i}") is made[i] for i in (0, *range(2, grammar.MAX_CACHED))] == [
        True
    ] * 15
    assert make(model, "regex", "k1") is not made[1]
    assert open_to(made[1].start((), STOP)) == {"k"}  # requests that have it are served


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fields whose schemas were checked by their metaschema. No schema was before the test."""
    fields: list[str] = []
    check = schema_encoding.check_schema

    def record(schema: Any, param: str, strict: bool) -> None:
        fields.append(param)
        check(schema, param, strict)

    monkeypatch.setattr(schema_encoding, "check_schema", record)
    schema_encoding.encoded_schemas.clear()
    yield fields
    schema_encoding.encoded_schemas.clear()


def test_a_schema_is_checked_once(model: Any, checked: list[str]) -> None:
    """Agents send their tools with each request. A wrong schema is checked again, for its error."""
    tools = [CallPattern("f", PERSON, "", "tools[0]"), CallPattern("g", {"type": "string"}, "", "tools[1]")]
    for _ in range(3):
        compile_calls(tools, model, param="tools")
    assert checked == ["tools[0]", "tools[1]"]
    make(model, "json_schema", PERSON, strict=False)
    assert len(checked) == 2, "also in another field"
    make(model, "json_schema", PERSON)
    assert len(checked) == 3, "but not in strict mode"
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^field\.type: "):
            make(model, "json_schema", {"type": "strin"})
    assert len(checked) == 5


def test_too_many_schemas_are_refused_unchecked(model: Any, checked: list[str]) -> None:
    half = make_optional(grammar_checks.MAX_SCHEMAS // 2)
    tools = [CallPattern(name, half, "", f"tools[{name}]") for name in "fg"]
    with pytest.raises(RequestError, match="^tools: has more than 10000 schemas"):
        compile_calls(tools, model, param="tools")
    with pytest.raises(RequestError, match="^field: has more than 10000 schemas"):
        make(model, "json_schema", {"anyOf": [half, half]})
    assert checked == []


async def test_the_grammar_of_a_client_that_has_left_is_abandoned(model: Any, checked: list[str]) -> None:
    """The check that runs is the last one: the schema of the next tool is not looked at."""
    begun, may_end = threading.Event(), threading.Event()
    patterns = [CallPattern("f", {}, "", "tools[0]"), CallPattern("g", PERSON, "", "tools[1]")]

    def work() -> None:
        make(model, "json_schema", {"type": "null"})
        begun.set()
        may_end.wait(60)
        compile_calls(patterns, model, param="tools")

    task = asyncio.create_task(Lane("test", 1).run(work))
    assert await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert checked == ["field"]


def test_the_characters_of_cached_grammars_are_bounded(
    model: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a compiled grammar follows its source, so the sum of the sources is bounded too."""
    size = len(make(model, "choice", ["x" * 900]).source)
    small: Cache = LRUCache(3 * size, getsizeof=lambda made: len(made.source))
    monkeypatch.setattr(grammar, "compiled_grammars", small)
    made = [make(model, "choice", [c * 900]) for c in "abc"]
    assert (len(small), small.currsize) == (3, 3 * size)
    assert make(model, "choice", ["a" * 900]) is made[0]
    assert make(model, "choice", ["d"]) is not None  # b goes, though d is small
    assert [make(model, "choice", [c * 900]) is made[i] for i, c in ((0, "a"), (2, "c"))] == [True, True]
    assert make(model, "choice", ["b" * 900]) is not made[1]
    assert small.currsize <= 3 * size
    largest = make(model, "choice", ["f" * (2 * size)])
    assert len(small) == 1 and make(model, "choice", ["f" * (2 * size)]) is largest
    source = "x" * grammar.MAX_CHARACTERS  # the largest that is compiled, which the cache has space for
    assert cache.getsizeof(CompiledGrammar(largest.tokens, source, largest.matcher)) <= cache.maxsize


# Each x may be the one that counts, so that the states of the lexer multiply.
TANGLED = r"(.*x.{1,12}y.{1,12}z[^a]*)+"


@pytest.mark.parametrize("thinks", [False, True])
def test_a_grammar_that_failed_is_compiled_again_and_no_other(
    model: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch, thinks: bool
) -> None:
    """Copies share a lexer: at its limit every copy fails, so the next request needs another one."""
    other = make(model, "regex", "ab")
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 500)
    made = make(model, "regex", TANGLED)
    row = (made.begin_after(ReasoningBounds("</think>")) if thinks else made).start((), STOP)
    with pytest.raises(RequestError, match="too many states"):
        say(row, [*b"</think>" * thinks, *Random(1).choices(b"xyzab", k=1000)])
    with pytest.raises(RequestError, match="too many states"):
        made.start((), STOP).mask()
    assert len(cache) == 1 and make(model, "regex", "ab") is other
    again = make(model, "regex", TANGLED)
    assert again is not made and "x" in open_to(again.start((), STOP))
    with pytest.raises(RequestError, match="too many states"):
        made.start((), STOP).mask()  # rows of the old one do not evict the new one
    assert make(model, "regex", TANGLED) is again


def test_a_token_that_does_not_fit_evicts_nothing(model: Any, cache: Cache) -> None:
    """The counterpart: the row failed, not the lexer."""
    made = make(model, "regex", "ab")
    with pytest.raises(RequestError, match="does not allow token 120"):
        made.start(b"x", STOP)
    assert len(cache) == 1 and make(model, "regex", "ab") is made


# -- behind reasoning -------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def thinking(model: Any, closer: str = "</think>", opener_ids: tuple[int, ...] = ()) -> GrammarMatcher:
    return make(model, "json_schema", SCHEMA).begin_after(ReasoningBounds(closer, opener_ids)).start((), STOP)


def test_nothing_but_stop_tokens_is_forbidden_in_reasoning(model: Any) -> None:
    row = say(thinking(model), b'{"x": </thin')
    everything = open_to(row)
    assert len(everything) == SIZE - 1 and EOS not in everything
    assert not row.done


@pytest.mark.parametrize(
    "close",
    [[UNTHINK], list(b"</think>"), [LONG["</th"], LONG["ink>"]], [*b"<</th", LONG["ink>"]], [*b"</</think>"]],
    ids=["special", "letters", "two tokens", "after a false start", "nested start"],
)
def test_the_grammar_begins_behind_the_reasoning(model: Any, close: list[int]) -> None:
    """Behind the reasoning, not in it, however the closing tag is split into tokens."""
    row = say(thinking(model), [*b'hm {"', *close])
    assert open_to(row) == {"{", LONG['{"'], "\t", "\n", "\r", " ", LONG["\n\n"]}
    assert open_to(say(row, b'{"a":')) == {" ", "-", *"0123456789"}


def test_a_token_may_close_the_reasoning_and_begin_the_answer(model: Any) -> None:
    row = say(thinking(model), [LONG["</th"], LONG['ink>\n{"']])
    assert open_to(say(row, b'a"')) == {" ", ":"}
    blank = say(thinking(model), [LONG["</th"], LONG["ink>  "]])
    assert "{" in open_to(blank)
    with pytest.raises(RequestError, match="does not allow"):
        say(thinking(model), [LONG["</th"], LONG["ink>no"]])


def test_whitespace_behind_reasoning_is_bounded(model: Any) -> None:
    row = say(thinking(model), [UNTHINK, *[10] * MAX_GAP])
    assert open_to(row) == {"{", LONG['{"']}
    with pytest.raises(RequestError, match="does not allow"):
        row.accept(10)


def test_the_model_may_reason_or_not(model: Any) -> None:
    """If the prompt does not open reasoning, the answer begins with the opening tokens, or with itself."""
    opens = (THINK, 10)
    assert open_to(thinking(model, opener_ids=opens)) == {"{", LONG['{"'], THINK}
    assert open_to(say(thinking(model, opener_ids=opens), b"{")) >= {'"'}
    row = say(thinking(model, opener_ids=opens), [THINK])
    assert open_to(row) == {"\n"} and not row.done
    assert len(open_to(say(row, b"\n"))) == SIZE - 1
    assert "{" in open_to(say(row, [*b"so", UNTHINK]))


# -- calls ------------------------------------------------------------------------------------------------

PATTERNS = [
    CallPattern('<tool_call>\n{"name": "add", "arguments": ', SCHEMA, "}\n</tool_call>", "tools[0]"),
    CallPattern(
        '<tool_call>\n{"name": "now", "arguments": ',
        {"type": "object", "maxProperties": 0},
        "}\n</tool_call>",
        "tools[1]",
    ),
]
ADD = [CALL, *b'\n{"name": "add", "arguments": {"a": 1}}\n', UNCALL]
NOW = [CALL, *b'\n{"name": "now", "arguments": {}}\n', UNCALL]


def test_calls_match_their_patterns(model: Any) -> None:
    """tool_choice required: one of the patterns, with special tokens and the tool's own schema."""
    made = compile_calls(PATTERNS, model, param="tools", separator="\n")
    row = made.start((), STOP)
    assert open_to(row) == {CALL}
    assert open_to(say(row, ADD)) == {"\n", EOS}
    assert open_to(say(row, [10, *NOW])) == {"\n", EOS}
    mixed = say(made.start((), STOP), [CALL, *b'\n{"name": "'])
    assert open_to(mixed) == {"a", "n"}


def test_one_call_is_one(model: Any) -> None:
    row = say(compile_calls(PATTERNS[:1], model, param="tools").start((), STOP), ADD)
    assert row.done and open_to(row) == {EOS}


def test_calls_without_special_tokens_and_without_a_separator(model: Any) -> None:
    row = compile_calls([CallPattern("f(", True, ")", "tools[0]")], model, param="tools", separator="").start(
        (), STOP
    )
    assert open_to(say(row, b'f([1,{"a":null}])')) == {"f", EOS}


def test_a_pattern_may_end_in_a_stop_token(model: Any) -> None:
    """As harmony's `<|call|>`: the one stop token that fits there, and the end of the answer."""
    stops = frozenset({EOS, OTHER})
    row = compile_calls(
        [CallPattern("f ", {"type": "null"}, "<|unused_3|>", "tools[0]")], model, param="tools"
    ).start((), stops)
    assert open_to(say(row, b"f null")) == {OTHER}
    assert say(row, [OTHER]).done
    assert open_to(row) == stops


def test_a_tools_schema_that_cannot_be_enforced(model: Any) -> None:
    """It is named by its own path, not by the field of all of them."""
    patterns = [CallPattern("f(", {}, ")", "tools[0].p"), CallPattern("g(", {"not": {}}, ")", "tools[1].p")]
    with pytest.raises(RequestError, match="Unimplemented keys") as caught:
        compile_calls(patterns, model, param="tools", strict=True)
    assert caught.value.param == "tools[1].p"
    assert compile_calls(patterns, model, param="tools").matcher.get_grammar_warnings()


@pytest.mark.parametrize("key", ["allOf", "anyOf"])
def test_references_that_multiply(model: Any, key: str) -> None:
    """40 levels that each name the next one twice are compiled as 40, not as 2 ** 40."""
    levels = {f"l{at}": {key: [{"$ref": f"#/$defs/l{at + 1}"}] * 2} for at in range(40)}
    schema = {"$ref": "#/$defs/l0", "$defs": {**levels, "l40": {"const": 1}}}
    assert open_to(make(model, "json_schema", schema).start((), STOP)) - {" ", "\n"} == {"1"}
