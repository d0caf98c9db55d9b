"""Log lines as text and as JSON: no record is more than one line, but for its traceback."""

from __future__ import annotations

import json
import logging
import re

import pytest

from mlxrun.core.visible_text import FIELDS, JsonFormatter, TextFormatter, describe_trace, start_logging


def make_record(message: str, error: Exception | None = None, **extra: str) -> logging.LogRecord:
    found = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord("mlxrun", logging.ERROR, "", 0, "%s", (message,), found)  # type: ignore[arg-type]
    record.__dict__.update(extra)
    return record


def raise_error(text: str) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_a_message_is_one_line() -> None:
    text = TextFormatter().format(make_record("a\n12:00:00 INFO forged\x1b"))
    assert re.fullmatch(r"\d\d:\d\d:\d\d ERROR a\\n12:00:00 INFO forged\\x1b", text)
    assert len(TextFormatter().format(make_record("a" * 9000))) <= 2000


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_tracebacks_forge_no_line(formatter: logging.Formatter) -> None:
    error = raise_error("why\n12:00:00 INFO forged\x1b\x9b")
    text = formatter.format(make_record("failed", error))
    assert "why" in text and not re.search("[\x1b\x9b]|^12:00", text, re.MULTILINE)


def test_json_lines() -> None:
    row = json.loads(JsonFormatter().format(make_record("a\nb\x9b\u202e")))
    assert (row["level"], row["logger"], row["message"]) == ("error", "mlxrun", "a\nb\x9b\u202e")
    error = raise_error("why")
    assert "ValueError: why" in json.loads(JsonFormatter().format(make_record("failed", error)))["exception"]
    assert len(json.loads(JsonFormatter().format(make_record("a" * 9000)))["message"]) <= 2000


def test_fields_of_a_record() -> None:
    """Programs read them beside the message; for people the message says enough."""
    fields = {"request_id": "req_1", "status": 200, "key": None, "end": "a\x9b"}
    record = make_record("req_1 200", **{FIELDS: fields})
    row = json.loads(JsonFormatter().format(record))
    assert {name: row[name] for name in fields} == fields and row["message"] == "req_1 200"
    assert "\x9b" not in JsonFormatter().format(record)
    assert TextFormatter().format(record).endswith(" ERROR req_1 200")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_a_trace_without_the_text_of_its_error(formatter: logging.Formatter) -> None:
    trace = describe_trace(raise_error("a prompt").__traceback__)
    text = formatter.format(make_record("failed", **trace))
    assert "raise_error" in text and "a prompt" not in text


def test_logging_of_other_processes(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        start_logging("info")
        logging.getLogger("mlxrun.test").info("a\nb")
    finally:
        root.handlers[:], root.level = before, level
    assert capsys.readouterr().err.endswith(" INFO a\\nb\n")
