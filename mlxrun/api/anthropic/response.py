"""Builds Anthropic's errors, lists of models and message batches; stream.py builds messages.

The requests of a batch are checked when they run, since their errors are results too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mlxrun.api.anthropic.fields import THREAD_UNSUPPORTED
from mlxrun.api.anthropic.tagged_schema import check_fields
from mlxrun.api.body_schema import OBJECT, STRING, object_of
from mlxrun.core.errors import (
    Draining,
    NotReady,
    PromptTooLong,
    RequestError,
    describe_error,
    get_http_status,
)
from mlxrun.core.field_errors import quote, reject

Json = dict[str, Any]

BATCHES = "/v1/messages/batches"
MAX_REQUESTS = 100_000
HOURS = 24  # after which a batch expires
REQUEST = object_of({"custom_id": STRING, "params": OBJECT})
BODY = object_of({"requests": {"type": "array", "minItems": 1, "maxItems": MAX_REQUESTS, "items": REQUEST}})
_CUSTOM_ID = re.compile("[a-zA-Z0-9_-]{1,64}")

_OVERLOADED = 529
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def get_error_status(error: BaseException) -> int:
    """Return the HTTP status of an error: Anthropic's 529 if the server drains or is not ready."""
    return _OVERLOADED if isinstance(error, (Draining, NotReady)) else get_http_status(error)


def build_error(error: BaseException, request_id: str) -> Json:
    """Build Anthropic's error object. An error that is not meant for users shows only its class."""
    status = get_error_status(error)
    text = describe_error(error)
    if isinstance(error, PromptTooLong):
        text = f"prompt is too long: {text}"  # clients look for these words, and shorten the conversation
    default = "invalid_request_error" if 400 <= status < 500 else "api_error"
    kind = _ERROR_TYPES.get(status, default)
    found: Json = {"type": kind, "message": text}
    if isinstance(error, RequestError) and error.code == THREAD_UNSUPPORTED:
        found["details"] = {"error_code": THREAD_UNSUPPORTED, "unsupported": ["thread"]}
    return {"type": "error", "error": found, "request_id": request_id}


def format_time(seconds: float | None) -> str | None:
    """Format seconds since 1970 as in RFC 3339; None stays None."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def build_models_page(names: Sequence[str]) -> Json:
    """Build Anthropic's response of /v1/models. The dates are unknown, so they are those of the epoch."""
    date = format_time(0)
    return {
        "data": [{"type": "model", "id": name, "display_name": name, "created_at": date} for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


def check_request(request: Any, where: str) -> tuple[str, Json]:
    """Return the `custom_id` and the `params` of a batch's request. RequestError if one is wrong."""
    given = check_fields(request, where, REQUEST)
    name, params = given["custom_id"], given["params"]
    if not _CUSTOM_ID.fullmatch(name):
        reject(f"{where}.custom_id", f"{quote(name)} is not 1 to 64 letters, digits, '_' and '-'")
    return name, params


def build_request_counts(total: int, succeeded: int, errored: int, ended: str | None) -> Json:
    """Build the `request_counts` of a batch. All its requests are `processing` until it has ended.

    `ended`: how requests without an answer ended (canceled, expired or errored); None while the batch
    runs."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if ended is None:
        return counts | {"processing": total}
    counts |= {"succeeded": succeeded, "errored": errored}
    counts[ended] += total - succeeded - errored
    return counts


def build_succeeded(custom_id: str, message: Json) -> Json:
    """Build the result of a request that was answered."""
    return {"custom_id": custom_id, "result": {"type": "succeeded", "message": message}}


def build_errored(custom_id: str, error: Json) -> Json:
    """Build the result of a request that was refused or failed. `error`: as build_error returns it."""
    return {"custom_id": custom_id, "result": {"type": "errored", "error": error}}


def build_unanswered(custom_id: str, ended: str) -> Json:
    """Build the result of a request that did not run. `ended`: as in build_request_counts."""
    if ended == "errored":
        error = {"type": "api_error", "message": "the batch failed before this request was answered"}
        return build_errored(custom_id, {"type": "error", "error": error, "request_id": None})
    return {"custom_id": custom_id, "result": {"type": ended}}
