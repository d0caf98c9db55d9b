"""The lines that a job writes, in the shape of OpenAI's batch output and error files.

Records are a function of the line, its key and its answer alone: ids are made from the key, `created` is
always 0, and how much came from a cache is left out, so that two runs can be compared byte by byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.batch.job_file import BadLine
from mlxrun.batch.line_index import Entry
from mlxrun.batch.scoring import Eval, answer_text, score
from mlxrun.errors import MlxrunError

CREATED = 0
ID_PREFIX = "batch_req_"
_ID = re.compile(ID_PREFIX + "[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer as its body reports them."""

    prompt: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Prompt tokens that a line cost in this run."""

    computed: int = 0
    reused: int = 0


def request_id(key: str) -> str:
    return "req_" + key[:24]


def answer_record(entry: Entry, body: dict[str, Any]) -> dict[str, Any]:
    """The output record of a line that was answered."""
    if isinstance(usage := body.get("usage"), dict):
        body = {**body, "usage": {k: v for k, v in usage.items() if k != "prompt_tokens_details"}}
    response = {"status_code": 200, "request_id": request_id(entry.key), "body": body}
    record = {
        "id": ID_PREFIX + entry.key,
        "custom_id": entry.line.custom_id,
        "response": response,
        "error": None,
    }
    return scored(record, entry.line.eval)


def scored(record: dict[str, Any], wanted: Eval | None) -> dict[str, Any]:
    """`record` with its answer compared (again) with what is wanted."""
    record = {key: value for key, value in record.items() if key != "eval"}
    if wanted is not None:
        good = record["error"] is None and score(wanted, answer_text(record["response"]["body"]))
        record["eval"] = {"score": int(good), "match": wanted.match, "group": wanted.group}
    return record


def bad_record(entry: Entry) -> dict[str, Any]:
    """The error record of a line that is no request at all."""
    assert isinstance(entry.line, BadLine)
    return _error(entry, None, "invalid_line", entry.line.reason, entry.line.param)


def error_record(entry: Entry, error: Exception) -> dict[str, Any]:
    """The error record of a request that was refused or failed, with what the server would answer."""
    from mlxrun.api.openai.response import build_error

    status = error.http_status if isinstance(error, MlxrunError) else 500
    body = build_error(error)
    response = {"status_code": status, "request_id": request_id(entry.key), "body": body}
    return _error(entry, response, body["error"]["code"], body["error"]["message"], body["error"]["param"])


def _error(
    entry: Entry, response: dict[str, Any] | None, code: str, message: str, param: str | None
) -> dict[str, Any]:
    record = {
        "id": ID_PREFIX + entry.key,
        "custom_id": entry.line.custom_id,
        "response": response,
        "error": {"code": code, "message": message, "line": entry.line.number, "param": param},
    }
    return scored(record, entry.line.eval)


def dump(record: Mapping[str, Any]) -> bytes:
    """One line. Unicode line ends are escaped, so that every tool sees one line; so are lone surrogates."""
    text = json.dumps(record, ensure_ascii=False)
    for end in ("\x85", "\u2028", "\u2029"):
        if end in text:
            text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode("utf-8", "backslashreplace") + b"\n"


def parse(data: bytes) -> dict[str, Any] | None:
    """A line that has the shape of a record of ours, or None."""
    try:
        record = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not _ID.fullmatch(str(record.get("id"))):
        return None
    shapes = {"custom_id": (str, type(None)), "response": (dict, type(None)), "error": (dict, type(None))}
    if any(key not in record or not isinstance(record[key], kinds) for key, kinds in shapes.items()):
        return None
    return record if _complete(record) else None


def _complete(record: dict[str, Any]) -> bool:
    error = record["error"]
    if error is not None:
        return isinstance(error.get("line"), int)
    body = (record["response"] or {}).get("body")
    try:
        return isinstance(body, dict) and isinstance(answer_text(body), str)
    except (KeyError, IndexError, TypeError, AttributeError):
        return False


def usage(record: Mapping[str, Any]) -> Usage:
    """The tokens that a record reports."""
    body = (record["response"] or {}).get("body") or {}
    found = body.get("usage")
    if not isinstance(found, dict):
        return Usage()
    counts = [found.get(key) for key in ("prompt_tokens", "completion_tokens")]
    return Usage(*(count if isinstance(count, int) else 0 for count in counts))
