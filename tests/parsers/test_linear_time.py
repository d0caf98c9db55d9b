"""What a parser keeps while it reads, and what it reads again: work grows with the text, not its square."""

from __future__ import annotations

import json

import pytest

from mlxrun.parsers import text_stream as streams
from mlxrun.parsers.text_stream import TextStream
from tests.helpers.parser_corpus.core import CASES as CALLS
from tests.helpers.parser_corpus.core import coder, hermes
from tests.helpers.parser_corpus.malformed import CASES as MENDED
from tests.helpers.parser_corpus.reasoning import CASES as THOUGHTS
from tests.helpers.parser_driver import Case, exact, make_tool_call_parser, parser, pieces, play

_LONG = "word " * 20_000
# What has to be kept while it is read: values that are typed as a whole, arguments before their name, a name
# that never ends, an answer that may be a call to its end.
_KEPT = {
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
}


def _copied(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> int:
    """Characters of the text that a stream holds, added up over all times that more comes: what is copied."""
    copied = 0
    add = TextStream.add_text

    def count(stream: TextStream, piece: str) -> None:
        nonlocal copied
        add(stream, piece)
        copied += len(stream._text)

    monkeypatch.setattr(TextStream, "add_text", count)
    parser = make_tool_call_parser(name, new_id=lambda: "id0")
    for at in range(0, len(text), 4):
        parser.feed(text[at : at + 4])
    parser.finish()
    return copied


@pytest.mark.parametrize("what", _KEPT)
def test_what_is_kept_is_not_copied_with_every_piece(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A54: the work of long values in small pieces grows as they do, not with their square."""
    name, text = _KEPT[what]
    assert _copied(monkeypatch, name, text) < 4 * len(text)


def test_a_megabyte_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of one value that is typed as a whole."""
    text = coder("write_file", {"tags": ["x" * 1_000_000]})
    assert _copied(monkeypatch, "qwen3_coder", text) < 2 * len(text)


def test_copies_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a stream that keeps all it has read in one text."""
    rest = TextStream._keep_taken
    monkeypatch.setattr(TextStream, "_keep_taken", lambda stream: rest(stream) if stream._settled else None)
    assert _copied(monkeypatch, *_KEPT["no call at all"]) > 1000 * len(_LONG)


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
    assert play(lambda: parser(case), [text]) == [text]
    return taken


@pytest.mark.parametrize(("family", "unit"), OPENERS)
def test_text_full_of_openers_is_not_read_for_each(
    monkeypatch: pytest.MonkeyPatch, family: str, unit: str
) -> None:
    """Each seems to begin a call that never ends; some are tried, then they are text."""
    text = unit * 400
    assert _read(monkeypatch, family, text, 20_000) < 20_000 + 4 * len(text)


@pytest.mark.parametrize(("family", "unit"), OPENERS)
def test_reading_again_is_seen(monkeypatch: pytest.MonkeyPatch, family: str, unit: str) -> None:
    """The twin: without a bound."""
    text = unit * 400
    assert _read(monkeypatch, family, text, 10**9) > 20 * len(text)


def test_what_is_tried_does_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A56: also where nothing is tried after the first failure."""
    monkeypatch.setattr(streams, "MAX_WASTED", 0)
    changed = 0
    for case in (*CALLS, *THOUGHTS, *MENDED):
        whole = exact(play(lambda case=case: parser(case), [case.text]))  # type: ignore[misc]
        changed += whole != exact(case.want)
        for size in (1, 4):
            found = play(lambda case=case: parser(case), pieces(case.text, size))  # type: ignore[misc]
            assert exact(found) == whole, f"{case.id}, pieces of {size}"
    assert changed
