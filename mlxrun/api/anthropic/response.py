"""Builds Anthropic's error object and list of models, and writes times.

stream.py builds messages, whole ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mlxrun.api.anthropic.fields import THREAD_UNSUPPORTED
from mlxrun.core.errors import (
    Draining,
    NotReady,
    PromptTooLong,
    RequestError,
    describe_error,
    get_http_status,
)

Json = dict[str, Any]

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
    """The HTTP status of an error: Anthropic's own for a server that is temporarily unavailable."""
    return _OVERLOADED if isinstance(error, (Draining, NotReady)) else get_http_status(error)


def build_error(error: BaseException, request_id: str) -> Json:
    """Anthropic's error object. Errors that are not meant for users are named by their class only."""
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
    """Seconds since 1970 in the format of RFC 3339."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def build_models_page(names: Sequence[str]) -> Json:
    """The response of /v1/models in Anthropic's format. The date is unknown: the epoch."""
    date = format_time(0)
    return {
        "data": [{"type": "model", "id": name, "display_name": name, "created_at": date} for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
