"""Log lines, as text or as JSON. No message can forge a line, and none is longer than a message may be."""

from __future__ import annotations

import logging
import textwrap
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from mlxrun.core.errors import shorten_message
from mlxrun.core.visible_text import dump_json, make_message, make_visible

TRACE = "trace"  # in `extra`: the lines of a traceback without the text of its error, which may be a prompt


def describe_trace(trace: TracebackType | None) -> dict[str, str]:
    """The `extra` of a record that shows where an error was raised, and not what it says."""
    return {TRACE: "".join(traceback.format_tb(trace))}


class TextFormatter(logging.Formatter):
    """One line for each record; tracebacks follow, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and below it the trace in its `extra`."""
        line = make_message(super().formatMessage(record))
        trace = getattr(record, TRACE, "")
        return f"{line}\n{_indent(trace.rstrip())}" if trace else line

    def formatException(self, ei: Any) -> str:
        """Return the lines of a traceback."""
        return _indent(super().formatException(ei))


def _indent(lines: str) -> str:
    return textwrap.indent(make_visible(lines), "    ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shorten_message(record.getMessage()),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        elif trace := getattr(record, TRACE, ""):
            row["exception"] = trace
        return dump_json(row)


def start_logging(level: str) -> None:
    """Log as text from this level on, in a process that is no command, unless its logging is set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())
