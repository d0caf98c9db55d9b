"""Grammars by themselves: what a row may say next, what is refused and how (B23, issue 5.6)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxrun.errors import RequestError
from mlxrun.model.grammar_masks import RowGrammar, make_grammar_mask
from mlxrun.scheduler.request import GrammarMatcher
from mlxrun.structured import grammar
from mlxrun.structured.grammar import CallFrame, CompiledGrammar, compile_calls, compile_grammar
from mlxrun.structured.kept import Kept
from mlxrun.structured.matcher import GAP, ReasoningBounds
from tests.helpers import byte_tokenizer
from tests.helpers.byte_tokenizer import TOKEN_ID
from tests.helpers.schema_cases import PERSON

# Tokens of more than a byte, as real vocabularies have them; the special ones come behind them.
TEXTS = ["</th", "ink>", 'ink>\n{"', "ink>  ", "\n\n", '{"', "ink>no"]
LONG = {text: 256 + i for i, text in enumerate(TEXTS)}
IDS = {text: i + len(LONG) for text, i in TOKEN_ID.items()}
SIZE = 300 + len(LONG)
EOS, OTHER = IDS["<|im_end|>"], IDS["<|unused_3|>"]
THINK, UNTHINK, CALL, UNCALL = (IDS[t] for t in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
STOP = frozenset({EOS})


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
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


def make(host: Any, of: Any, value: Any = None, **options: Any) -> CompiledGrammar:
    return compile_grammar(of, value, host, param="field", **options)


def open_to(constraint: GrammarMatcher) -> set[int | str]:
    """What may follow: bytes as characters, other tokens as ids."""
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    return {chr(i) if i < 256 else int(i) for i in np.flatnonzero(bits)}


def say(constraint: GrammarMatcher, tokens: Iterable[int]) -> GrammarMatcher:
    """Each token must be allowed before it is said."""
    for token in tokens:
        assert constraint.mask()[token // 8] >> token % 8 & 1, token
        constraint.accept(token)
    return constraint


# -- stop tokens ------------------------------------------------------------------------------------------


def test_a_stop_token_comes_where_the_answer_is_complete_and_only_there(host: Any) -> None:
    row = make(host, "regex", "ab*").start((), STOP)
    assert open_to(row) == {"a"}
    assert open_to(say(row, b"a")) == {"b", EOS}
    assert not row.done
    say(row, [EOS])
    assert row.done and open_to(row) == {EOS}


def test_a_complete_answer_leaves_the_stop_tokens_alone(host: Any) -> None:
    row = say(make(host, "choice", ["yes", "no"]).start((), frozenset({EOS, OTHER})), b"yes")
    assert row.done and open_to(row) == {EOS, OTHER}


def test_stop_tokens_are_the_requests_own(host: Any) -> None:
    """ignore_eos: the model's own end is no token of the answer; a stop id may be any token, a letter too."""
    assert open_to(say(make(host, "regex", "a+").start((), frozenset()), b"a")) == {"a"}
    assert open_to(make(host, "regex", "[ab]c").start((), frozenset({ord("b")}))) == {"a"}
    far = frozenset({5000})
    assert open_to(say(make(host, "regex", "a").start((), far), b"a")) == {5000}


def test_what_was_said_is_replayed(host: Any) -> None:
    made = make(host, "json_schema", PERSON)
    first, again = made.start((), STOP), made.start(b'{"name":"x",', STOP)
    say(first, b'{"name":"x",')
    assert first.mask() == again.mask()
    with pytest.raises(RequestError, match="does not allow token 120"):
        made.start(b"x", STOP)


def test_an_end_too_early_is_seen(host: Any) -> None:
    """The twin of the masks: a stop token that was not allowed fails the row."""
    with pytest.raises(RequestError, match=f"does not allow token {EOS}"):
        make(host, "regex", "ab").start((), STOP).accept(EOS)


def test_rows_of_one_grammar_do_not_touch_each_other(host: Any) -> None:
    made = make(host, "regex", "[ab]c")
    one, other = made.start((), STOP), made.start((), STOP)
    say(one, b"a")
    with pytest.raises(RequestError):
        one.accept(ord("a"))
    assert open_to(other) == {"a", "b"}
    assert open_to(made.start((), STOP)) == {"a", "b"}


# -- JSON -------------------------------------------------------------------------------------------------


def test_whitespace_is_bounded(host: Any) -> None:
    """B23: a model that only says whitespace would hang: one space is all there may be."""
    row = make(host, "json_schema", PERSON).start((), STOP)
    assert open_to(row) == {"{", LONG['{"']}
    say(row, b"{")
    assert open_to(row) >= {" ", '"'} and "\n" not in open_to(row)
    row = make(host, "json_schema", PERSON).start(b"{ ", STOP)
    assert open_to(row) == {'"'}


def test_a_schema_cannot_change_how_it_is_compiled(host: Any) -> None:
    """`x-guidance` is ours: a schema that asks for leniency or free whitespace does not get it."""
    loose = {
        "x-guidance": {"lenient": True, "whitespace_pattern": " *"},
        "type": "array",
        "items": {"not": {}},
    }
    with pytest.raises(RequestError, match='Unimplemented keys: \\["not"\\]'):
        make(host, "json_schema", loose)
    row = make(host, "json_schema", loose | {"items": {"type": "null"}}).start(b"[ ", STOP)
    assert " " not in open_to(row)


def test_not_strict_says_what_is_not_enforced(host: Any) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(RequestError, match="uniqueItems"):
        make(host, "json_schema", schema)
    assert make(host, "json_schema", schema, strict=False).warnings == (
        'Unimplemented keys: ["uniqueItems"]',
    )
    assert make(host, "json_schema", {"nonsense": 1}, strict=False).warnings == ()


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
    ("lark", "start: foo", "field", 'unknown name: "foo"'),
    ("lark", "start: <[99999]>", "field", "out of range|too large"),
    ("ebnf", "root ::= ::", "field", "Expected name at line 1"),
    ("json_schema", 5, "field", "expected object"),
    ("json_schema", {"type": "strin"}, "field.type", "is no valid JSON Schema"),
    ("json_schema", {"properties": {"a": {"minLength": -1}}}, "field.properties.a.minLength", "less than"),
    ("json_schema", {"minimun": 1}, "field.minimun", "did you mean 'minimum'"),
    ("json_schema", {"anyOf": [{}, {"lenght": 1}]}, "field.anyOf[1].lenght", "no keyword"),
    ("json_schema", {"$defs": {"a": {"typ": "null"}}}, "field.$defs.a.typ", "no keyword"),
    ("json_schema", {"not": {"type": "null"}}, "field", "not"),
    ("json_schema", {"if": {"type": "null"}}, "field", "if"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "field", "oneOf"),
    ("json_schema", {"$ref": "http://elsewhere/schema"}, "field", "retrieving it failed"),
    ("json_schema", {"$ref": "#"}, "field", "no text matches it"),
    ("json_schema", {"type": "string", "format": "colour"}, "field", "Unknown format: colour"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "field", "Unsatisfiable"),
    ("json_schema", False, "field", "Unsatisfiable"),
    ("json_schema", {"const": float("nan")}, "field", "expected value"),
    ("json_schema", {"exclusiveMinimum": 2, "maximum": 2.5}, "field.exclusiveMinimum", "cannot be enforced"),
    (
        "json_schema",
        {"allOf": [{"exclusiveMaximum": 2}, {"minimum": 1.5}]},
        "field.exclusiveMaximum",
        "cannot",
    ),
    ("json_schema", {"minProperties": 2}, "field.minProperties", "cannot be enforced"),
]


@pytest.mark.parametrize(("of", "value", "param", "reason"), REFUSED)
def test_what_is_wrong_is_said(host: Any, of: str, value: Any, param: str, reason: str) -> None:
    """B23: a 400 that names the field and gives llguidance's reason; never ignored, never a crash."""
    with pytest.raises(RequestError, match=reason) as caught:
        make(host, of, value)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_a_schema_that_is_nested_too_deeply(host: Any) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        make(host, "json_schema", schema)


def test_names_of_properties_are_no_keywords(host: Any) -> None:
    fine = {
        "properties": {"minimun": {"const": {"typ": 1}}},
        "enum": [{"lenght": 1}],
        "x-order": 1,
        "default": {"q": 1},
    }
    make(host, "json_schema", fine)


@pytest.fixture
def kept() -> Iterator[Kept[CompiledGrammar]]:
    """The compiled grammars that are kept: none before and after."""
    grammar._kept.clear()
    yield grammar._kept
    grammar._kept.clear()


def test_compiled_grammars_are_kept_and_their_number_is_bounded(
    host: Any, kept: Kept[CompiledGrammar]
) -> None:
    """One goes for one that comes: the one that was not asked for for longest."""
    made = [make(host, "regex", f"k{i}") for i in range(grammar.KEPT)]
    assert make(host, "regex", "k0") is made[0]
    make(host, "regex", "more")
    assert len(kept) == grammar.KEPT
    assert [make(host, "regex", f"k{i}") is made[i] for i in (0, *range(2, grammar.KEPT))] == [True] * 15
    assert make(host, "regex", "k1") is not made[1]
    assert open_to(made[1].start((), STOP)) == {"k"}  # requests that have it are served


def test_large_grammars_are_kept_only_so_far_as_there_is_room(
    host: Any, kept: Kept[CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a compiled grammar holds follows its source: the sum of these is bounded too."""
    size = len(make(host, "choice", ["x" * 900]).source)
    monkeypatch.setattr(grammar, "_kept", small := Kept[CompiledGrammar](grammar.KEPT, 3 * size))
    made = [make(host, "choice", [c * 900]) for c in "abc"]
    assert (len(small), small.size) == (3, 3 * size)
    assert make(host, "choice", ["a" * 900]) is made[0]
    assert make(host, "choice", ["d"]) is not None  # b goes, though d is small
    assert [make(host, "choice", [c * 900]) is made[i] for i, c in ((0, "a"), (2, "c"))] == [True, True]
    assert make(host, "choice", ["b" * 900]) is not made[1]
    assert small.size <= 3 * size
    largest = make(host, "choice", ["f" * 5000])
    assert len(small) == 1 and make(host, "choice", ["f" * 5000]) is largest


# Each x may be the one that counts, so that the states of the lexer multiply.
TANGLED = r"(.*x.{1,12}y.{1,12}z[^a]*)+"


@pytest.mark.parametrize("thinks", [False, True])
def test_a_grammar_that_fails_is_made_anew_and_no_other(
    host: Any, kept: Kept[CompiledGrammar], monkeypatch: pytest.MonkeyPatch, thinks: bool
) -> None:
    """Copies share a lexer: at its limit every copy fails, so the next request needs another."""
    other = make(host, "regex", "ab")
    monkeypatch.setattr(grammar, "STATES", 500)
    made = make(host, "regex", TANGLED)
    row = (made.after(ReasoningBounds("</think>")) if thinks else made).start((), STOP)
    with pytest.raises(RequestError, match="too many states"):
        say(row, [*b"</think>" * thinks, *Random(1).choices(b"xyzab", k=1000)])
    with pytest.raises(RequestError, match="too many states"):
        made.start((), STOP).mask()
    assert len(kept) == 1 and make(host, "regex", "ab") is other
    again = make(host, "regex", TANGLED)
    assert again is not made and "x" in open_to(again.start((), STOP))
    with pytest.raises(RequestError, match="too many states"):
        made.start((), STOP).mask()  # the old one's rows do not push out the new one
    assert make(host, "regex", TANGLED) is again


def test_a_token_that_does_not_fit_drops_nothing(host: Any, kept: Kept[CompiledGrammar]) -> None:
    """The twin: the row's fault, not the lexer's."""
    made = make(host, "regex", "ab")
    with pytest.raises(RequestError, match="does not allow token 120"):
        made.start(b"x", STOP)
    assert len(kept) == 1 and make(host, "regex", "ab") is made


# -- after a thought --------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def thinking(host: Any, closes: str = "</think>", opens: tuple[int, ...] = ()) -> GrammarMatcher:
    return make(host, "json_schema", SCHEMA).after(ReasoningBounds(closes, opens)).start((), STOP)


def test_nothing_but_stop_tokens_is_forbidden_in_a_thought(host: Any) -> None:
    row = say(thinking(host), b'{"x": </thin')
    everything = open_to(row)
    assert len(everything) == SIZE - 1 and EOS not in everything
    assert not row.done


@pytest.mark.parametrize(
    "close",
    [[UNTHINK], list(b"</think>"), [LONG["</th"], LONG["ink>"]], [*b"<</th", LONG["ink>"]], [*b"</</think>"]],
    ids=["special", "letters", "two tokens", "after a false start", "nested start"],
)
def test_the_grammar_begins_behind_the_thought(host: Any, close: list[int]) -> None:
    """Issue 5.6: after the thought, not in it, however the marker is cut into tokens."""
    row = say(thinking(host), [*b'hm {"', *close])
    assert open_to(row) == {"{", LONG['{"'], "\t", "\n", "\r", " ", LONG["\n\n"]}
    assert open_to(say(row, b'{"a":')) == {" ", "-", *"0123456789"}


def test_a_token_may_close_the_thought_and_begin_the_answer(host: Any) -> None:
    row = say(thinking(host), [LONG["</th"], LONG['ink>\n{"']])
    assert open_to(say(row, b'a"')) == {" ", ":"}
    blank = say(thinking(host), [LONG["</th"], LONG["ink>  "]])
    assert "{" in open_to(blank)
    with pytest.raises(RequestError, match="does not allow"):
        say(thinking(host), [LONG["</th"], LONG["ink>no"]])


def test_whitespace_behind_a_thought_is_bounded(host: Any) -> None:
    row = say(thinking(host), [UNTHINK, *[10] * GAP])
    assert open_to(row) == {"{", LONG['{"']}
    with pytest.raises(RequestError, match="does not allow"):
        row.accept(10)


def test_the_model_may_think_or_not(host: Any) -> None:
    """A prompt that does not open the thought: the answer begins with the opening tokens, or with itself."""
    opens = (THINK, 10)
    assert open_to(thinking(host, opens=opens)) == {"{", LONG['{"'], THINK}
    assert open_to(say(thinking(host, opens=opens), b"{")) >= {'"'}
    row = say(thinking(host, opens=opens), [THINK])
    assert open_to(row) == {"\n"} and not row.done
    assert len(open_to(say(row, b"\n"))) == SIZE - 1
    assert "{" in open_to(say(row, [*b"so", UNTHINK]))


# -- calls ------------------------------------------------------------------------------------------------

FRAMES = [
    CallFrame('<tool_call>\n{"name": "add", "arguments": ', SCHEMA, "}\n</tool_call>"),
    CallFrame(
        '<tool_call>\n{"name": "now", "arguments": ',
        {"type": "object", "maxProperties": 0},
        "}\n</tool_call>",
    ),
]
ADD = [CALL, *b'\n{"name": "add", "arguments": {"a": 1}}\n', UNCALL]
NOW = [CALL, *b'\n{"name": "now", "arguments": {}}\n', UNCALL]


def test_calls_in_their_frames(host: Any) -> None:
    """tool_choice required: one of the frames, special tokens as such, arguments by the tool's own schema."""
    made = compile_calls(FRAMES, host, param="tools", between="\n")
    row = made.start((), STOP)
    assert open_to(row) == {CALL}
    assert open_to(say(row, ADD)) == {"\n", EOS}
    assert open_to(say(row, [10, *NOW])) == {"\n", EOS}
    mixed = say(made.start((), STOP), [CALL, *b'\n{"name": "'])
    assert open_to(mixed) == {"a", "n"}


def test_one_call_is_one(host: Any) -> None:
    row = say(compile_calls(FRAMES[:1], host, param="tools").start((), STOP), ADD)
    assert row.done and open_to(row) == {EOS}


def test_calls_without_special_tokens_and_without_anything_between(host: Any) -> None:
    row = compile_calls([CallFrame("f(", True, ")")], host, param="tools", between="").start((), STOP)
    assert open_to(say(row, b'f([1,{"a":null}])')) == {"f", EOS}


def test_a_frame_may_end_in_a_stop_token(host: Any) -> None:
    """As harmony's `<|call|>`: the one stop token that fits there, and the end of the answer."""
    stops = frozenset({EOS, OTHER})
    row = compile_calls([CallFrame("f ", {"type": "null"}, "<|unused_3|>")], host, param="tools").start(
        (), stops
    )
    assert open_to(say(row, b"f null")) == {OTHER}
    assert say(row, [OTHER]).done
    assert open_to(row) == stops


def test_a_tools_schema_that_cannot_be_enforced(host: Any) -> None:
    frames = [CallFrame("f(", {"not": {}}, ")")]
    with pytest.raises(RequestError, match="Unimplemented keys"):
        compile_calls(frames, host, param="tools[0].function.parameters", strict=True)
    assert compile_calls(frames, host, param="tools").warnings


# -- the model's side -------------------------------------------------------------------------------------


class Fixed:
    """A constraint with one mask."""

    def __init__(self, *tokens: int, size: int = 3) -> None:
        bits = bytearray(size)
        for token in tokens:
            bits[token // 8] |= 1 << token % 8
        self._mask, self.done = bytes(bits), False

    def mask(self) -> bytes:
        return self._mask

    def accept(self, token: int) -> None:
        raise AssertionError(token)


def rows(guards: list[RowGrammar | None], vocab: int) -> list[list[int]]:
    mask = make_grammar_mask(guards, vocab)
    assert mask is not None and mask.shape == (len(guards), vocab)
    return [np.flatnonzero(np.array(row)).tolist() for row in mask]


@pytest.mark.parametrize("vocab", [20, 24, 37, 64])
def test_logits_may_be_wider_than_the_vocabulary(vocab: int) -> None:
    """Padding rows of the output layer are no tokens; rows without a grammar keep them all."""
    assert rows([RowGrammar(Fixed(0, 9, 19)), None], vocab) == [[0, 9, 19], list(range(vocab))]


def test_logits_may_be_narrower_than_the_vocabulary() -> None:
    guards = [RowGrammar(Fixed(3, 11, 12)), RowGrammar(Fixed(12, 23))]
    assert rows(guards, 12) == [[3, 11], list(range(12))]
    assert guards[0].error is None and "allows no token" in str(guards[1].error)


def test_no_masks_without_grammars() -> None:
    assert make_grammar_mask([None, None], 300) is None
