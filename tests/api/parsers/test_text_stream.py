"""The work of reading grows with the length of the text, not with its square."""

from __future__ import annotations

import json

import pytest

from mlxrun.api.parsers import text_stream as streams
from mlxrun.api.parsers.text_stream import TextStream
from tests.helpers.parser_corpus.core import CASES as CALLS
from tests.helpers.parser_corpus.core import coder, hermes
from tests.helpers.parser_corpus.malformed import CASES as MALFORMED
from tests.helpers.parser_corpus.reasoning import CASES as REASONING
from tests.helpers.parser_driver import (
    Case,
    make_parser,
    make_tool_call_parser,
    normalise,
    run_parser,
    split_evenly,
)

_LONG = "word " * 20_000
# What has to be kept while it is read: values that are typed as a whole, arguments before their name, a name
# that never ends, an answer that may be a call to its end.
_HELD_BACK = {
    "a typed value": (
        "glm",
        f"<tool_call>write_file<arg_key>meta</arg_key><arg_value>{_LONG}</arg_value></tool_call>",
    ),
    "a typed value in XML": ("qwen3_coder", coder("write_file", {"tags": [_LONG]})),
    "arguments before the name": (
        "hermes",
        f'<tool_call>{{"arguments": {{"content": "{_LONG}"}}, "name": "write_file"}}</tool_call>',
    ),
    "a call to no one": (
        "hermes",
        f'<tool_call>{{"name": "rm", "arguments": {{"a": "{_LONG}"}}}}</tool_call>',
    ),
    "no call at all": ("hermes", f'<tool_call>{{"a": "{_LONG}'),
    "no name": ("kimi_k2", f"<|tool_call_begin|>{_LONG}"),
    "a Python string": ("pythonic", f'[write_file(content="{_LONG}")]'),
    "a Python list": ("pythonic", f"[write_file(tags=[{'1, ' * 20_000}])]"),
    "the last resort": ("json", json.dumps({"name": "write_file", "arguments": {"content": _LONG}})),
    "an object that is none": ("xlam", f'[{{"{_LONG}'),
    "space": ("hermes", "a" + "\n" * 100_000),
    "a value that flows": ("hermes", hermes("write_file", {"content": _LONG})),
    "a message's header": ("harmony", f"<|channel|>{_LONG}"),
    "end tags in a string": ("qwen3_coder", coder("write_file", {"content": "</parameter> " * 8_000})),
    "end tags in an array": ("qwen3_coder", coder("write_file", {"tags": ["</parameter> "] * 6_000})),
    "quotes in a Python string": ("pythonic", "[write_file(content='" + "it's " * 20_000 + "')]"),
    "quotes in Gemma's string": ("gemma4", "<|tool_call>call:write_file{content:'" + "it's " * 20_000 + "'}"),
    "objects that are no calls": ("hermes", '{"a": [{}]}\n' * 8_000),
    "fences that are no calls": ("hermes", '```json\n{"a": 1}\n```\n' * 5_000),
}


def _copied(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> int:
    """Characters of the text that a stream holds, added up over all times that more comes: what is copied."""
    copied = 0
    add = TextStream.add_text

    def count(stream: TextStream, chunk: str) -> None:
        nonlocal copied
        add(stream, chunk)
        copied += len(stream._text)

    monkeypatch.setattr(TextStream, "add_text", count)
    parser = make_tool_call_parser(name, new_id=lambda: "id0")
    for at in range(0, len(text), 4):
        parser.feed(text[at : at + 4])
    parser.finish()
    return copied


@pytest.mark.parametrize("what", _HELD_BACK)
def test_text_that_is_held_back_is_not_copied_with_every_chunk(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The work of long values in small chunks grows as they do, not with their square."""
    name, text = _HELD_BACK[what]
    assert _copied(monkeypatch, name, text) < 4 * len(text)


def test_a_megabyte_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of one value that is typed as a whole."""
    text = coder("write_file", {"tags": ["x" * 1_000_000]})
    assert _copied(monkeypatch, "qwen3_coder", text) < 2 * len(text)


def test_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart: a stream that keeps all that it has read in one string."""
    rest = TextStream.keep_taken
    monkeypatch.setattr(TextStream, "keep_taken", lambda stream: rest(stream) if stream._settled else None)
    assert _copied(monkeypatch, *_HELD_BACK["no call at all"]) > 1000 * len(_LONG)


# -- openers without end ----------------------------------------------------------------------------------

OPENERS = [
    ("pythonic", "<|tool_call_start|>[now("),
    ("pythonic", "<|tool_call_start|>[now(a='x\""),
    ("qwen3_coder", "<function=now><parameter=a>"),
]


def _read(monkeypatch: pytest.MonkeyPatch, family: str, text: str, waste: int) -> int:
    """Characters that are taken when an answer of nothing but openers comes at once; all of it is text."""
    taken = 0
    take = TextStream.take

    def count(stream: TextStream, size: int) -> str:
        nonlocal taken
        found = take(stream, size)
        taken += len(found)
        return found

    monkeypatch.setattr(TextStream, "take", count)
    monkeypatch.setattr(streams, "MAX_WASTED", waste)
    case = Case("openers", family, text, [])
    assert run_parser(lambda: make_parser(case), [text]) == [text]
    return taken


@pytest.mark.parametrize(("family", "unit"), OPENERS)
def test_text_full_of_openers_is_not_read_for_each(
    monkeypatch: pytest.MonkeyPatch, family: str, unit: str
) -> None:
    """Each seems to begin a call that never ends; some are tried, then they are text."""
    text = unit * 400
    assert _read(monkeypatch, family, text, 20_000) < 20_000 + 4 * len(text)


@pytest.mark.parametrize(("family", "unit"), OPENERS)
def test_reading_again_is_counted(monkeypatch: pytest.MonkeyPatch, family: str, unit: str) -> None:
    """The counterpart: without a limit."""
    text = unit * 400
    assert _read(monkeypatch, family, text, 10**9) > 20 * len(text)


def test_what_is_tried_does_not_depend_on_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is tried after the first failure."""
    monkeypatch.setattr(streams, "MAX_WASTED", 0)
    changed = 0
    for case in (*CALLS, *REASONING, *MALFORMED):
        whole = normalise(run_parser(lambda case=case: make_parser(case), [case.text]))  # type: ignore[misc]
        changed += whole != normalise(case.expected)
        for size in (1, 4):
            found = run_parser(lambda case=case: make_parser(case), split_evenly(case.text, size))  # type: ignore[misc]
            assert normalise(found) == whole, f"{case.id}, chunks of {size}"
    assert changed
