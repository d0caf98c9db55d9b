"""Anthropic's errors and list of models."""

from __future__ import annotations

import pytest

from mlxrun.api.anthropic.response import build_error, build_models_page, format_time, get_error_status
from mlxrun.core.errors import (
    BodyTooLarge,
    Draining,
    EngineDead,
    Forbidden,
    NotFound,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthorized,
)
from tests.helpers.anthropic_api import USER, body, count, make, refused
from tests.helpers.tokenizers import FakeModelInfo


def test_names_of_the_model() -> None:
    model_info = FakeModelInfo(name="m", names=("claude-x",))
    assert make(body(model="claude-x"), model_info).prepared.model == "m"
    error = refused(body(model="gpt"), model_info)
    assert error.param == "model" and get_error_status(error) == 404
    with pytest.raises(NotFound, match="'gpt' is not served here"):
        count({"model": "gpt", "messages": [USER]}, model_info)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (Overloaded("x"), 429, "rate_limit_error"),
        (Draining("x"), 529, "overloaded_error"),
        (EngineDead("x"), 503, "api_error"),
        (KeyError("secret"), 500, "api_error"),
    ],
)
def test_errors(error: BaseException, status: int, kind: str) -> None:
    made = build_error(error, "req_7")
    assert get_error_status(error) == status
    assert made == {
        "type": "error",
        "error": {"type": kind, "message": made["error"]["message"]},
        "request_id": "req_7",
    }
    assert "secret" not in made["error"]["message"]


def test_agents_recognise_a_prompt_that_is_too_long() -> None:
    """They look for these words to shorten the conversation."""
    error = refused(body([{"role": "user", "content": "x" * 99}]), FakeModelInfo(context_length=64))
    assert isinstance(error, PromptTooLong)
    assert build_error(error, "r")["error"]["message"].startswith("prompt is too long: the prompt has")


def test_models() -> None:
    page = build_models_page(["a", "b"])
    assert [model["id"] for model in page["data"]] == ["a", "b"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
    assert build_models_page([])["first_id"] is None


def test_times() -> None:
    assert format_time(0) == "1970-01-01T00:00:00Z" and format_time(None) is None
