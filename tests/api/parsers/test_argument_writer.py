"""The arguments of a call: nothing is written before it is certain, and they can be closed at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.delta import DeltaBuilder
from mlxrun.api.parsers.tool_schemas import ValueSchema

Write = Callable[[ArgumentWriter], None]


class _Call:
    """A writer, with what it has written so far."""

    def __init__(self, id: str = "") -> None:
        self.out = DeltaBuilder(lambda: "new")
        self.progress: list[bool] = []
        self.writer = ArgumentWriter(self.out, "f", ValueSchema({}), self.progress.append, id)
        self.id = ""
        self.text = ""

    def take(self) -> str:
        """Return the arguments so far."""
        for delta in self.out.take():
            assert (delta.kind, delta.index) == ("call", 0)
            self.id += delta.id
            self.text += delta.text
        return self.text


def _close(*writes: Write) -> Any:
    """Return the arguments of a call that is closed behind these."""
    call = _Call()
    for write in writes:
        write(call.writer)
    call.writer.close()
    return json.loads(call.take())


# What formats write one after the other, and the arguments that are closed behind each.
STEPS: list[tuple[Write, dict[str, Any]]] = [
    (lambda w: w.open_container("{"), {}),
    (lambda w: w.write_key("a"), {}),
    (lambda w: w.write_value("1"), {"a": 1}),
    (lambda w: w.write_key("b"), {"a": 1}),
    (lambda w: w.open_container("["), {"a": 1, "b": []}),
    (lambda w: w.open_string(), {"a": 1, "b": [""]}),
    (lambda w: w.write_text('x"\n'), {"a": 1, "b": ['x"\n']}),
    (lambda w: w.write_escaped("\\u00e9"), {"a": 1, "b": ['x"\né']}),
    (lambda w: w.close_innermost(), {"a": 1, "b": ['x"\né']}),
    (lambda w: w.write_value("null"), {"a": 1, "b": ['x"\né', None]}),
    (lambda w: w.close_innermost(), {"a": 1, "b": ['x"\né', None]}),
    (lambda w: w.write_member("c", '{"d": []}'), {"a": 1, "b": ['x"\né', None], "c": {"d": []}}),
    (lambda w: w.open_text_member("e"), {"a": 1, "b": ['x"\né', None], "c": {"d": []}, "e": ""}),
]


@pytest.mark.parametrize("count", range(len(STEPS) + 1))
def test_arguments_can_be_closed_at_any_moment(count: int) -> None:
    """They have the members that came, and what came of an open string, array or object."""
    steps = STEPS[:count]
    assert _close(*(write for write, _ in steps)) == (steps[-1][1] if steps else {})


def test_nothing_is_written_before_it_is_certain() -> None:
    """The brace comes with the first member, a key with its value."""
    call = _Call()
    seen = []
    for write, _ in STEPS[:6]:
        write(call.writer)
        seen.append(call.take())
    assert seen == ["", "", '{"a": 1', '{"a": 1', '{"a": 1, "b": [', '{"a": 1, "b": ["']


def test_a_call_begins_with_its_first_argument_or_its_end() -> None:
    call = _Call("mine")
    assert not call.writer.started and call.out.calls == 0
    call.writer.write_key("a") if call.writer.started else call.writer.open_container("{")
    assert not call.writer.started
    call.writer.close()
    assert call.writer.started and call.out.calls == 1
    assert (call.take(), call.id) == ("{}", "mine")


def test_progress_is_told_after_each_write() -> None:
    call = _Call()
    call.writer.write_member("a", "1")
    assert call.progress == [False]
    call.writer.close()
    assert call.progress[-1] is True and call.progress.count(True) == 1


def test_text_is_escaped() -> None:
    """Without escapes that are not needed; a lone surrogate can be encoded."""
    call = _Call()
    call.writer.open_text_member("a")
    call.writer.write_text("é\t\x00\ud800")
    call.writer.write_text("")
    call.writer.close()
    assert json.loads(call.take()) == {"a": "é\t\x00\ud800"}
    call.take().encode()
