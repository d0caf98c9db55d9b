"""Anthropic's Message Batches: the body that creates one, the object that describes one, and its results.

The requests of a batch are checked as bodies of /v1/messages when they run, as their errors are results too.
"""

from __future__ import annotations

import re
from typing import Any

from mlxrun.api.anthropic.fields import check_fields
from mlxrun.api.body_schema import OBJECT, STRING, object_of
from mlxrun.core.field_errors import quote, reject

Json = dict[str, Any]

BATCHES = "/v1/messages/batches"
MAX_REQUESTS = 100_000
HOURS = 24  # after which a batch expires
REQUEST = object_of({"custom_id": STRING, "params": OBJECT})
BODY = object_of({"requests": {"type": "array", "minItems": 1, "maxItems": MAX_REQUESTS, "items": REQUEST}})
_CUSTOM_ID = re.compile("[a-zA-Z0-9_-]{1,64}")


def check_request(request: Any, where: str) -> tuple[str, Json]:
    """The id and the params of one request."""
    given = check_fields(request, where, REQUEST)
    name, params = given["custom_id"], given["params"]
    if not _CUSTOM_ID.fullmatch(name):
        reject(f"{where}.custom_id", f"{quote(name)} is not 1 to 64 letters, digits, '_' and '-'")
    return name, params


def build_request_counts(total: int, succeeded: int, errored: int, ended: str | None) -> Json:
    """The `request_counts` of a batch: all requests are `processing` until it has ended. `ended`: how those
    without an answer ended, one of canceled, expired and errored; None while the batch runs."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if ended is None:
        return counts | {"processing": total}
    counts |= {"succeeded": succeeded, "errored": errored}
    counts[ended] += total - succeeded - errored
    return counts


def build_succeeded(custom_id: str, message: Json) -> Json:
    """The result of a request that was answered."""
    return {"custom_id": custom_id, "result": {"type": "succeeded", "message": message}}


def build_errored(custom_id: str, error: Json) -> Json:
    """The result of a request that was refused or failed; `error`: Anthropic's error object."""
    return {"custom_id": custom_id, "result": {"type": "errored", "error": error}}


def build_unanswered(custom_id: str, ended: str) -> Json:
    """The result of a request that did not run; `ended` as in build_request_counts."""
    if ended == "errored":
        error = {"type": "api_error", "message": "the batch failed before this request was answered"}
        return build_errored(custom_id, {"type": "error", "error": error, "request_id": None})
    return {"custom_id": custom_id, "result": {"type": ended}}
