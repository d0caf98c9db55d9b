"""The records that a job writes, in the format of OpenAI's batch output and error files.

Records depend on the line, its key and its answer alone: ids are made from the key, `created` is always 0,
and cached tokens are left out, so that two runs can be compared byte by byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.batch.job_file import BadLine
from mlxrun.batch.line_index import IndexedLine
from mlxrun.batch.scoring import EvalSpec, extract_answer, score
from mlxrun.errors import MlxrunError

CREATED = 0
ID_PREFIX = "batch_req_"
_ID = re.compile(ID_PREFIX + "[0-9a-f]{32}")


@dataclass(slots=True)
class LineTokens:
    """Tokens of one line in this run, all its tries together: prompt tokens computed and reused, and
    output."""

    computed: int = 0
    reused: int = 0
    output: int = 0

    def add(self, computed: int, reused: int, output: int) -> None:
        self.computed += computed
        self.reused += reused
        self.output += output


def make_request_id(key: str) -> str:
    return "req_" + key[:24]


def build_answer_record(indexed: IndexedLine, body: dict[str, Any]) -> dict[str, Any]:
    """The output record of an answered line."""
    if isinstance(usage := body.get("usage"), dict):
        body = {**body, "usage": {k: v for k, v in usage.items() if k != "prompt_tokens_details"}}
    response = {"status_code": 200, "request_id": make_request_id(indexed.key), "body": body}
    return _build_record(indexed, response, None)


def add_score(record: dict[str, Any], wanted: EvalSpec | None) -> dict[str, Any]:
    """`record` with its answer scored (again) by `wanted`."""
    record = {key: value for key, value in record.items() if key != "eval"}
    if wanted is not None:
        good = record["error"] is None and score(wanted, extract_answer(record["response"]["body"]))
        record["eval"] = {"score": int(good), "match": wanted.match, "group": wanted.group}
    return record


def build_bad_line_record(indexed: IndexedLine) -> dict[str, Any]:
    """The error record of a line that is not a valid request."""
    assert isinstance(indexed.line, BadLine)
    return _build_record(indexed, None, ("invalid_line", indexed.line.reason, indexed.line.param))


def build_error_record(indexed: IndexedLine, error: Exception) -> dict[str, Any]:
    """The error record of a request that was refused or failed, with the response of a server."""
    from mlxrun.api.openai.response import build_error

    status = error.http_status if isinstance(error, MlxrunError) else 500
    body = build_error(error)
    response = {"status_code": status, "request_id": make_request_id(indexed.key), "body": body}
    found = body["error"]
    return _build_record(indexed, response, (found["code"], found["message"], found["param"]))


def _build_record(
    indexed: IndexedLine, response: dict[str, Any] | None, error: tuple[str, str, str | None] | None
) -> dict[str, Any]:
    """A record in either file; `error`: code, message and parameter."""
    line = indexed.line
    record = {"id": ID_PREFIX + indexed.key, "custom_id": line.custom_id, "response": response, "error": None}
    if error is not None:
        code, message, param = error
        record["error"] = {"code": code, "message": message, "line": line.number, "param": param}
    return add_score(record, line.eval)


def dump_record(record: Mapping[str, Any]) -> bytes:
    """The record as one line of JSON. Unicode line separators and lone surrogates are escaped."""
    text = json.dumps(record, ensure_ascii=False)
    for end in ("\x85", "\u2028", "\u2029"):
        if end in text:
            text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode("utf-8", "backslashreplace") + b"\n"


def parse_record(data: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it does not have the shape of a record."""
    try:
        record = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not _ID.fullmatch(str(record.get("id"))):
        return None
    shapes = {"custom_id": (str, type(None)), "response": (dict, type(None)), "error": (dict, type(None))}
    if any(key not in record or not isinstance(record[key], kinds) for key, kinds in shapes.items()):
        return None
    return record if _is_complete(record) else None


def _is_complete(record: dict[str, Any]) -> bool:
    error = record["error"]
    if error is not None:
        return isinstance(error.get("line"), int)
    body = (record["response"] or {}).get("body")
    try:
        return isinstance(body, dict) and isinstance(extract_answer(body), str)
    except (KeyError, IndexError, TypeError, AttributeError):
        return False


def read_usage(record: Mapping[str, Any]) -> tuple[int, int]:
    """The prompt and output tokens that a record reports."""
    body = (record["response"] or {}).get("body") or {}
    found = body.get("usage")
    counts = found if isinstance(found, dict) else {}
    prompt, output = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return prompt if isinstance(prompt, int) else 0, output if isinstance(output, int) else 0
