"""The records that a job writes: the format of OpenAI's batch output and error files, whatever the API.

A record depends on its line, the line's key and the answer alone; ids are made from the key. In records of a
command, `created` is 0 and cached tokens are left out, so that two runs can be compared byte by byte.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxrun.core.errors import get_http_status, shorten_message
from mlxrun.core.visible_text import escape_line_ends
from mlxrun.jobs.lines.job_file import MESSAGE, BadLine, JobLine
from mlxrun.jobs.lines.line_index import IndexedLine
from mlxrun.jobs.records.journal import LineTimes
from mlxrun.jobs.scoring.answer_text import extract_answer
from mlxrun.jobs.scoring.line_scores import score_response
from mlxrun.jobs.scoring.score_groups import Scores

log = logging.getLogger(__name__)
CREATED = 0
SHOWN_NOTES = 5  # warnings of one job about answers that could not be scored
ID_PREFIX = "batch_req_"
AGENT_KEYS = ("transcript", "agent")  # of records of conversations with tools
_BAD_LINE = "invalid_line"  # as the code of an error
_ID = re.compile(ID_PREFIX + "[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class BatchStamp:
    """What distinguishes the answers of one batch of a server from others. `batch_id`: part of line keys;
    `created_at`: seconds since 1970. Both stay the same when the batch is continued."""

    batch_id: str
    created_at: int


@dataclass(slots=True)
class LineTokens:
    """Tokens of one line in this run, of all its tries together: prompt tokens computed and reused, and
    output tokens. `times`: when they came."""

    computed: int = 0
    reused: int = 0
    output: int = 0
    times: LineTimes = field(default_factory=LineTimes)

    def add(self, computed: int, reused: int, output: int) -> None:
        self.computed += computed
        self.reused += reused
        self.output += output


def make_request_id(key: str) -> str:
    return "req_" + key[:24]


def build_answer_record(indexed: IndexedLine, body: dict[str, Any]) -> dict[str, Any]:
    """Build the output record of an answered line. Of a conversation with tools, what the body has in
    AGENT_KEYS is beside the response."""
    extra = {key: body[key] for key in AGENT_KEYS if key in body}
    body = {key: each for key, each in body.items() if key not in extra}
    response = {"status_code": 200, "request_id": make_request_id(indexed.key), "body": body}
    return _build_record(indexed, response, None, extra)


def add_score(record: dict[str, Any], line: JobLine | BadLine) -> dict[str, Any]:
    """Return `record` with its answer scored (again) by the `eval` of its line."""
    record = {key: value for key, value in record.items() if key != "eval"}
    if line.eval is not None:
        body = record["response"]["body"] if record["error"] is None else None
        # The line as scorers see it. Its `eval` has `expected`, `group` and the keys of its match.
        wanted = {"expected": line.eval.expected, "group": line.eval.group, **line.eval.options}
        seen = {"custom_id": line.custom_id, "number": line.number, "body": {}, "eval": wanted}
        if isinstance(line, JobLine):
            seen |= {"url": line.url, "body": line.body}
        record["eval"] = score_response(line.eval, body, seen, read_talk(record))
    return record


def read_talk(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the `transcript` and the last `state` of a conversation with tools; both are None without one."""
    return {"transcript": record.get("transcript"), "state": record.get("agent", {}).get("state")}


def warn_unscored(record: Mapping[str, Any], line: JobLine | BadLine, job: Path, scores: Scores) -> None:
    """Warn that an answer could not be scored, for the first SHOWN_NOTES answers of a job. `scores` must have
    counted it already."""
    result = record.get("eval") or {}
    if "note" not in result or (line.eval is not None and line.eval.waits_for_judge):
        return
    number = scores.waiting if result.get("match") == "judge" else scores.broken
    if number <= SHOWN_NOTES:
        note = " ".join(str(result["note"]).split())
        where, name = f"{job}:{line.number}", f"line {(line.custom_id or line.number)!r}"
        log.warning("%s: %s scores %g: %s", where, name, result["score"], note)
    if number == SHOWN_NOTES:
        log.warning("%s: more answers that cannot be scored are counted, and named in the output", job)


def build_bad_line_record(indexed: IndexedLine) -> dict[str, Any]:
    """Build the error record of a line that is not a valid request."""
    assert isinstance(indexed.line, BadLine)
    return _build_record(indexed, None, (_BAD_LINE, indexed.line.reason, indexed.line.param))


def is_of_bad_line(record: Mapping[str, Any]) -> bool:
    """Whether a record is one of `build_bad_line_record`."""
    return record["error"] is not None and record["error"].get("code") == _BAD_LINE


def build_error_record(indexed: IndexedLine, error: Exception) -> dict[str, Any]:
    """Build the error record of a request that was refused or failed, with its endpoint's error response."""
    from mlxrun.api.anthropic import response as anthropic
    from mlxrun.api.openai.response import build_error

    request_id, body = make_request_id(indexed.key), build_error(error)
    found, status = body["error"], get_http_status(error)
    if isinstance(indexed.line, JobLine) and indexed.line.url == MESSAGE:
        body, status = anthropic.build_error(error, request_id), anthropic.get_error_status(error)
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _build_record(indexed, response, (found["code"], found["message"], found["param"]))


def _build_record(
    indexed: IndexedLine,
    response: dict[str, Any] | None,
    error: tuple[str, str, str | None] | None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """A record in either file; `error`: code, message and parameter; `extra`: more of its keys."""
    line = indexed.line
    record = {"id": ID_PREFIX + indexed.key, "custom_id": line.custom_id, "response": response, "error": None}
    record |= extra
    if error is not None:
        code, message, param = error
        message, param = shorten_message(message), None if param is None else shorten_message(param)
        record["error"] = {"code": code, "message": message, "line": line.number, "param": param}
    return add_score(record, line)


def dump_record(record: Mapping[str, Any]) -> bytes:
    """Dump the record as one line of JSON. Unicode line separators and lone surrogates are escaped."""
    text = escape_line_ends(json.dumps(record, ensure_ascii=False))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def parse_record(data: bytes) -> dict[str, Any] | None:
    """Parse a line. None if it does not have the shape of a record."""
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
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return False


def read_usage(record: Mapping[str, Any]) -> tuple[int, int]:
    """Read the prompt and output tokens that a record reports."""
    body = (record["response"] or {}).get("body") or {}
    found = body.get("usage")
    counts = found if isinstance(found, dict) else {}
    prompt = counts.get("prompt_tokens", counts.get("input_tokens"))
    output = counts.get("completion_tokens", counts.get("output_tokens"))
    return prompt if isinstance(prompt, int) else 0, output if isinstance(output, int) else 0
