"""Runs a reader of `mlxrun.api.parsers.readers` on a text, in chunks of any size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas
from tests.helpers.parser_driver import TOOLS, Item, merge_deltas, normalise, split_evenly

Read = Callable[[TextStream], Step[Any]]


class ReaderRun(NamedTuple):
    """What a reader returned, or the class of what it raised; the items that it made; and the unread text, or
    all text if it raised before it had found anything."""

    result: Any
    items: list[Item]
    rest: str


def run_reader(read: Read, text: str, size: int = 0, tools: list[dict[str, Any]] | None = None) -> ReaderRun:
    """Run a reader as the parser does behind an empty opener. `size` of chunks; 0: the text comes at once."""
    count = itertools.count()
    stream = TextStream(ToolSchemas(TOOLS if tools is None else tools), lambda: f"id{next(count)}")
    stream.begin_attempt("")
    chunks = split_evenly(text, size or max(len(text), 1))
    steps = read(stream)
    result: Any = None
    try:
        while True:
            next(steps)
            if chunks:
                stream.add_text(chunks.pop(0))
            else:
                stream.ended = True
    except StopIteration as done:
        result, rest = done.value, stream.rest
    except (Malformed, StreamCut) as error:
        stream.abandon_attempt(isinstance(error, StreamCut))
        result = type(error)
        stream.end_attempt()
        rest = stream.rest
    stream.out.finish()
    return ReaderRun(result, merge_deltas(stream.out.take()), rest + "".join(chunks))


def check_reader(
    read: Read, text: str, items: list[Item], rest: str = "", tools: list[dict[str, Any]] | None = None
) -> ReaderRun:
    """Check the items and the unread text for chunks of several sizes; return the run on the text at once."""
    for size in (1, 2, 3, 7, 0):
        run = run_reader(read, text, size, tools)
        assert (normalise(run.items), run.rest) == (normalise(items), rest), f"chunks of {size}"
    return run
