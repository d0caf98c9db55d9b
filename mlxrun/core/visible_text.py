"""Makes text of files, models and clients safe to show: characters that a terminal would obey become visible.

Control characters, marks that change the direction of text and lone surrogates are written as `\\x1b` or
`\\u202e`. A message is one line of at most MAX_MESSAGE bytes, so it cannot forge a line of the log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from mlxrun.core.errors import shorten_message

# Controls but the line feed, also those of eight bits; marks of direction; separators at which some programs
# end a line; lone surrogates, which no output can encode.
_HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
TRACE = "trace"  # in `extra`: the lines of a traceback without the text of its error, which may be a prompt
FIELDS = "fields"  # in `extra`: what a record has besides its message, as a mapping of JSON values
_NAMED = {"\t": "\\t", "\r": "\\r"}


def make_visible(text: str) -> str:
    """The text with its hidden characters written out. Line feeds stay."""
    return _HIDDEN.sub(_write_out, text)


_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # that JSON text may have in strings


def escape_line_ends(text: str) -> str:
    """JSON text with escapes for the characters at which some programs end a line, as Python's `splitlines`
    does."""
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def make_line(text: str) -> str:
    """The text as one line, with line feeds written out too."""
    return make_visible(text).replace("\n", "\\n")


def make_message(text: str) -> str:
    """The text as one line of at most MAX_MESSAGE bytes."""
    return shorten_message(make_line(text))


def dump_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON with hidden characters as escapes. It is safe to print, and programs can read it."""
    return escape_json(json.dumps(value, indent=indent, ensure_ascii=False))


def escape_json(text: str) -> str:
    """JSON with its hidden characters as escapes."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _write_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _NAMED.get(found[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


@contextmanager
def name_stream(stream: object) -> Iterator[None]:
    """Give the name of the stream to an OSError of the block that has no path."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = "standard error" if stream is sys.__stderr__ else "standard output"
        raise


def describe_trace(trace: TracebackType | None) -> dict[str, str]:
    """The `extra` of a log record that shows where an error was raised, without its text."""
    return {TRACE: "".join(traceback.format_tb(trace))}


class TextFormatter(logging.Formatter):
    """One line for each record, with the traceback indented below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with the trace of its `extra` below."""
        line = make_message(super().formatMessage(record))
        trace = getattr(record, TRACE, "")
        return f"{line}\n{_indent(trace.rstrip())}" if trace else line

    def formatException(self, ei: Any) -> str:
        """Return the lines of a traceback."""
        return _indent(super().formatException(ei))


def _indent(lines: str) -> str:
    return textwrap.indent(make_visible(lines), "    ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the record's own fields and, if there is one, the
    traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shorten_message(record.getMessage()),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        elif trace := getattr(record, TRACE, ""):
            row["exception"] = trace
        return dump_json(row)


def start_logging(level: str) -> None:
    """Log as text from this level on, in a process that is no command. An existing setup of logging stays."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())
