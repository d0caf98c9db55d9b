"""Reads a job file: one JSON object a line, in OpenAI's batch format or in a short one, either with `eval`.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "a", "prompt": "..." | "messages": [...] | "input": "...", "max_tokens": 20, ...}

The short form may have a `url`; without it the line is a completion, a chat, a response, a reranking or a
transcription. Any other line becomes a BadLine with a reason. The file is read line by line; a BOM and CRLF
are accepted.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.core.errors import JobError
from mlxrun.core.field_errors import find_closest
from mlxrun.core.limited_json import STRICT, LongNumber, NestedTooDeeply, NotStrict, load_json
from mlxrun.core.text_files import check_encoding, is_stream, open_regular
from mlxrun.jobs.agents.agent_settings import CHAT, check_agent_line
from mlxrun.jobs.scoring.eval_spec import EvalReader, EvalSpec, check_line_eval

COMPLETION = "/v1/completions"
RESPONSE = "/v1/responses"
MESSAGE = "/v1/messages"
EMBEDDING = "/v1/embeddings"
RERANK = "/v1/rerank"
TRANSCRIPTION = "/v1/audio/transcriptions"
POOLED = (EMBEDDING, RERANK)  # whose lines get vectors in place of an answer
URLS = (CHAT, COMPLETION, RESPONSE, MESSAGE, *POOLED, TRANSCRIPTION)
MAX_LINE = 1 << 28  # bytes; a file that is not JSONL must not be read into memory as one line
_OPENAI_KEYS = ("custom_id", "method", "url", "body")
_FULL = "custom_id, method, url and body"
_EVAL_KEYS = ("expected", "match")  # no body has fields of these names
# Of short lines without a url.
_INPUTS = {
    "prompt": COMPLETION,
    "messages": CHAT,
    "input": RESPONSE,
    "query": RERANK,
    "file": TRANSCRIPTION,
}


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not empty, as bytes without its end. `number` counts all lines from 1; `offset` counts
    bytes."""

    number: int
    offset: int
    data: bytes
    too_long: bool = False


@dataclass(frozen=True, slots=True)
class JobLine:
    """A line that may be run. `body` is validated later, when the line is prepared. `agent`: its tool loop,
    which is valid. `id_key`: the key of its custom_id."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    eval: EvalSpec | None = None
    agent: dict[str, Any] | None = None
    id_key: str = "custom_id"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be run, and why. `custom_id` and `eval` are set if they could be read. `id_key`: as
    in JobLine."""

    number: int
    custom_id: str | None
    reason: str
    param: str | None = None
    eval: EvalSpec | None = None
    id_key: str = "custom_id"

    @property
    def spoils_file(self) -> bool:
        """Whether the problem concerns the whole file. It does if the line has no custom_id, if another line
        has the same one, or if the line is for another endpoint."""
        return self.custom_id is None or self.param in (self.id_key, "url")


class WrongEncoding(JobError):
    """The file is in UTF-16 or UTF-32. `reason`: without its path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: cannot read the job file: {reason}")
        self.reason = reason


class _LineError(Exception):
    def __init__(self, reason: str, param: str | None = None) -> None:
        super().__init__(reason)
        self.param = param


def open_job(path: Path) -> BinaryIO:
    """Open the job file. JobError if it cannot be read, or is not a file that can be read twice;
    WrongEncoding."""
    try:
        file = open_regular(path)
    except OSError as error:
        hint = "; a job is read more than once, so write it to a file" if is_stream(path) else ""
        raise JobError(f"{path}: cannot read the job file: {error.strerror}{hint}") from error
    try:
        check_encoding(file.read(4))
    except OSError as error:
        file.close()
        raise WrongEncoding(path, str(error.strerror)) from error
    file.seek(0)
    return file


def check_job_file(path: Path) -> None:
    """Raise JobError if the job file cannot be read or has no lines."""
    with open_job(path) as file:
        if next(read_lines(file), None) is None:
            raise JobError(f"{path}: the job has no lines")


def read_lines(
    file: BinaryIO, number: int = 1, offset: int = 0, watch: Callable[[bytes], object] | None = None
) -> Iterator[RawLine]:
    """Yield the lines of an open job file that are not empty, beginning with the line at `number` and
    `offset`. `watch` gets every byte that is read, in order."""
    file.seek(offset)
    readline = _watch_reads(file, watch) if watch else file.readline
    while data := readline(MAX_LINE):
        start, too_long = offset, False
        offset += len(data)
        while len(data) >= MAX_LINE and not data.endswith(b"\n"):  # too long: skip to its end
            rest = readline(MAX_LINE)
            too_long = too_long or bool(rest.strip())
            offset += len(rest)
            if not rest or rest.endswith(b"\n"):
                break
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if data := data.strip(b" \t\r\n"):
            yield RawLine(number, start, data[:100] if too_long else data, too_long)
        number += 1


def _watch_reads(file: BinaryIO, watch: Callable[[bytes], object]) -> Callable[[int], bytes]:
    def readline(limit: int) -> bytes:
        data = file.readline(limit)
        watch(data)
        return data

    return readline


NO_SCORERS = EvalReader()


def parse_line(
    raw: RawLine, only_url: str | None = None, evals: EvalReader = NO_SCORERS
) -> JobLine | BadLine:
    """Parse and validate a line. Of its body, only `stream` and what its `eval` needs are checked.
    `only_url`: the one URL that lines may have, None for any. Problems that spoil the file are found before
    others."""
    value: Any = None
    try:
        value = _decode(raw)
        if not isinstance(value, dict):
            raise _LineError(f"a line must be a JSON object, not {_name_type(value)}")
        parse = _parse_short if _find_id_key(value) == "id" else _parse_openai
        line = parse(raw.number, value, only_url)
        _check_eval_key(value)
        return _read_eval(_read_agent(line, value.get("agent")), value.get("eval"), evals)
    except _LineError as bad:
        wanted = _find_eval(_decode_loosely(raw) if value is None else value, evals)
        return BadLine(raw.number, _find_custom_id(value), str(bad), bad.param, wanted, _find_id_key(value))


def _decode(raw: RawLine) -> Any:
    if raw.too_long:
        raise _LineError(f"longer than {MAX_LINE >> 20} MiB")
    try:
        text = raw.data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw.data[error.start]
        raise _LineError(f"not UTF-8: byte 0x{byte:02x} at byte {error.start + 1}") from error
    try:
        value = load_json(text, **STRICT)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _LineError("contains a lone UTF-16 surrogate (\\ud800 to \\udfff): no text") from error
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")  # as in "Unterminated string starting at"
        raise _LineError(f"not JSON: {reason} at column {error.pos + 1}") from error
    except (NestedTooDeeply, LongNumber) as error:
        raise _LineError(f"not JSON that can be read: {error}") from error
    except NotStrict as error:
        raise _LineError(f"not JSON: {error}") from error
    return value


def _decode_loosely(raw: RawLine) -> Any:
    """The value of a line that is JSON but for a key that is given twice, a lone surrogate, NaN or a number
    that is too large; None if it is not. Such numbers become null."""
    hooks = {"parse_constant": lambda _: None, "parse_float": _parse_finite}
    try:
        return load_json(raw.data.decode(errors="replace"), **hooks)
    except ValueError:
        return None


def _parse_finite(text: str) -> float | None:
    """None for a number that would become infinite, which no JSON has."""
    found = float(text)
    return found if math.isfinite(found) else None


def _parse_short(number: int, value: dict[str, Any], only_url: str | None) -> JobLine:
    body = {key: item for key, item in value.items() if key not in ("id", "url", "eval", "agent")}
    given = [key for key in _INPUTS if key in body]
    url = _check_url(value["url"], only_url) if "url" in value else None
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise _LineError(f"a line needs {_FULL}, or id and one of {', '.join(_INPUTS)} ({got} given)")
    custom_id = _check_custom_id(value, "id")
    line = _make_line(number, custom_id, url or _check_url(_INPUTS[given[0]], only_url), body)
    return replace(line, id_key="id")


def _parse_openai(number: int, value: dict[str, Any], only_url: str | None) -> JobLine:
    url = _check_url(value["url"], only_url) if "url" in value else None
    if "id" in value and "custom_id" not in value:
        raise _LineError("custom_id is missing; id is for lines without body", "custom_id")
    custom_id = _check_custom_id(value, "custom_id")
    if url is None:
        raise _LineError("url is missing", "url")
    for key in value:
        if key not in (*_OPENAI_KEYS, "eval", "agent"):
            raise _LineError(f"unknown key {key!r}; a line takes {_FULL}, eval and agent", key)
    for key in _OPENAI_KEYS:
        if key not in value:
            raise _LineError(f"{key} is missing", key)
    if value["method"] != "POST":
        raise _LineError(f"method must be POST, not {_quote(value['method'])}", "method")
    if not isinstance(value["body"], dict):
        raise _LineError(f"body must be an object, not {_name_type(value['body'])}", "body")
    return _make_line(number, custom_id, url, value["body"])


def _check_url(found: Any, only_url: str | None) -> str:
    if not isinstance(found, str) or found not in URLS:
        raise _LineError(f"url must be one of {', '.join(URLS)}, not {_quote(found)}", "url")
    if only_url not in (None, found):
        raise _LineError(f"url is {found}, but these lines are for {only_url}", "url")
    return found


def _make_line(number: int, custom_id: str, url: str, body: dict[str, Any]) -> JobLine:
    if body.get("stream"):
        raise _LineError("stream is not supported in a job: answers are written once complete", "stream")
    return JobLine(number, custom_id, url, body)


def _check_eval_key(value: dict[str, Any]) -> None:
    """An `eval` under another name is no `eval`: the line would be missing in the score."""
    for key in value:
        if key in _EVAL_KEYS:
            raise _LineError(f"{key}: unknown key; it belongs into `eval`", "eval")
        if key != "eval" and find_closest(key, ("eval",)):
            raise _LineError(f"{key}: unknown key (did you mean 'eval'?)", "eval")


def _read_agent(line: JobLine, value: Any) -> JobLine:
    try:
        return line if value is None else replace(line, agent=check_agent_line(value, line.url, line.body))
    except ValueError as error:
        raise _LineError(str(error), "agent") from error


def _read_eval(line: JobLine, value: Any, evals: EvalReader) -> JobLine:
    try:
        wanted = evals.read(value)
        if wanted is not None:
            check_line_eval(wanted, line.url, line.body)
    except ValueError as error:
        raise _LineError(str(error), "eval") from error
    return replace(line, eval=wanted)


def _check_custom_id(value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise _LineError(f"{key} is missing", key)
    found = value[key]
    if not isinstance(found, str) or not found:
        raise _LineError(f"{key} must be a string that is not empty, not {_quote(found)}", key)
    return found


def _find_id_key(value: Any) -> str:
    """The key that the line's custom_id has: `id` in the short form."""
    is_short = isinstance(value, dict) and not any(key in value for key in _OPENAI_KEYS if key != "url")
    return "id" if is_short else "custom_id"


def _find_custom_id(value: Any) -> str | None:
    found = (value.get("custom_id") or value.get("id")) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _find_eval(value: Any, evals: EvalReader) -> EvalSpec | None:
    try:
        wanted = value.get("eval") if isinstance(value, dict) else None
        json.dumps(wanted, ensure_ascii=False).encode()
        return evals.read(wanted)
    except ValueError:
        return None


def _name_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _quote(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
