"""Standard output and standard error, and what is written to them.

Text that a command shows may contain parts of files. `filter_streams` filters both streams, whoever writes:
this program, a library or a traceback. Nothing passes that a terminal would obey. Only the consoles of
`open_console` write past the filter, because they filter their text before they style it.

`open_closed_streams` is for a process that was started without one of its standard streams,
`escape_unknown_characters` for one whose locale lacks characters.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TextIO

from mlxrun.core import visible_text
from mlxrun.core.visible_text import name_stream

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column

# How progress bars of libraries go back to the beginning of their line, or to a line above: in a write of its
# own. On terminals only.
_BAR_MOVES = re.compile(r"\r|(?:\x1b\[A)+\Z")


_PIPED_TABLE_WIDTH = 100_000  # columns of a table where nothing is wrapped


class FilteredStream:
    """A text stream that makes control characters visible. `unfiltered`: the stream below."""

    def __init__(self, unfiltered: TextIO) -> None:
        self.unfiltered = unfiltered

    def write(self, text: str) -> int:
        """Write the text with its control characters made visible. Returns the length of the text."""
        moves = _BAR_MOVES.match(text) if text[:1] in "\r\x1b" and self.isatty() else None
        start = moves[0] if moves else ""
        with name_stream(self.unfiltered):
            self.unfiltered.write(start + visible_text.make_visible(text[len(start) :]))
        return len(text)

    def flush(self) -> None:
        """Write out what the stream below holds."""
        with name_stream(self.unfiltered):
            self.unfiltered.flush()

    def writelines(self, lines: Any) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def open_closed_streams() -> None:
    """Open /dev/null in the place of each standard stream that the process was started without.

    Otherwise the next file that is opened has its number, and gets what libraries and children print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") if stream is None else stream
        for stream in (sys.stdout, sys.stderr)
    )


def escape_unknown_characters() -> None:
    """Have standard output write characters that its encoding lacks as `\\u00f6`, which JSON may have too.
    Answers and names have any, and a locale may be older than Unicode. Standard error escapes them anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("mlxrun.escape", _escape)
        sys.stdout.reconfigure(errors="mlxrun.escape")


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


@contextmanager
def filter_streams() -> Iterator[None]:
    """Filter standard output and standard error within the block."""
    earlier = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_filter(stream) for stream in earlier)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = earlier


def _filter(stream: TextIO | None) -> Any:
    """The stream with a filter; as it is if it has one, or if there is none."""
    return stream if stream is None or isinstance(stream, FilteredStream) else FilteredStream(stream)


def print_line(text: object, stream: TextIO | None = None) -> None:
    """Print a message as one line to a stream, by default to standard output."""
    print(visible_text.make_message(str(text)), file=stream or sys.stdout, flush=True)


def print_error(text: object) -> None:
    """Print a message as one line to standard error."""
    print_line(text, sys.stderr)


def print_text(text: str) -> None:
    """Print a text of several lines, as it is rendered, to standard output."""
    print(visible_text.make_visible(text), end="", flush=True)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON to standard output."""
    print(visible_text.dump_json(value, indent), flush=True)


def open_console(stream: IO[str] | None = None, width: int | None = None, **options: Any) -> Console:
    """A console that makes all text visible before it lays it out and styles it. Brackets in a text are no
    markup. `width`: columns where the stream is no terminal. The stream is standard output by default."""
    from mlxrun.core.visible_console import VisibleConsole

    stream = sys.stdout if stream is None else stream
    plain = stream.unfiltered if isinstance(stream, FilteredStream) else stream
    width = None if stream.isatty() else width
    return VisibleConsole(file=plain, width=width, markup=False, highlight=False, **options)


def make_columns(heads: Iterable[str], texts: int = 2) -> list[Column]:
    """Make the columns of a table, of which the first `texts` are texts, and the others numbers."""
    from rich.table import Column

    return [
        Column(head, justify="left" if at < texts else "right", overflow="fold")
        for at, head in enumerate(heads)
    ]


def print_table(
    columns: Iterable[Column], rows: Iterable[Iterable[str]], stream: IO[str] | None = None
) -> None:
    """Print a table without lines, by default to standard output. Only a terminal wraps its rows: a pipe has
    one line for each, so that what is in it can be found."""
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    open_console(stream, _PIPED_TABLE_WIDTH).print(table)
