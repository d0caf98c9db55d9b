"""Message batches as Anthropic's client reads and writes them."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.messages import MessageBatchIndividualResponse, MessageBatchRequestCounts

from mlxrun.api.anthropic.response import (
    BODY,
    build_errored,
    build_request_counts,
    build_succeeded,
    build_unanswered,
    check_request,
)
from mlxrun.core.errors import RequestError


def test_a_request() -> None:
    assert check_request({"custom_id": "a_B-9", "params": {"x": 1}}, "requests.3") == ("a_B-9", {"x": 1})


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (None, "requests.3: expected object, got null"),
        ({}, "requests.3.custom_id: Field required"),
        ({"custom_id": None, "params": {}}, "requests.3.custom_id: Field required"),
        ({"custom_id": 1, "params": {}}, "requests.3.custom_id: expected string"),
        ({"custom_id": "", "params": {}}, "requests.3.custom_id: '' is not 1 to 64"),
        ({"custom_id": "a\n", "params": {}}, "requests.3.custom_id: "),
        ({"custom_id": "a", "params": []}, "requests.3.params: expected object"),
        ({"custom_id": "a", "params": {}, "model": "m"}, "requests.3.model: Extra inputs are not permitted"),
    ],
)
def test_what_is_no_request(request_: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(request_, "requests.3")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ((9, 4, 2, None), {"processing": 9}),
        ((9, 7, 2, "errored"), {"succeeded": 7, "errored": 2}),
        ((9, 4, 2, "canceled"), {"succeeded": 4, "errored": 2, "canceled": 3}),
        ((9, 4, 2, "expired"), {"succeeded": 4, "errored": 2, "expired": 3}),
        ((9, 4, 2, "errored"), {"succeeded": 4, "errored": 5}),
    ],
)
def test_counts(progress: tuple[int, int, int, str | None], expected: dict[str, int]) -> None:
    """All are processing until the end; then they add up to the number of requests."""
    found = build_request_counts(*progress)
    MessageBatchRequestCounts.model_validate(found, strict=True)
    assert {name: count for name, count in found.items() if count} == expected
    assert sum(found.values()) == 9


def test_results() -> None:
    for result in (
        build_succeeded("a", {"type": "message"}),
        build_errored("a", {"type": "error", "error": {"type": "api_error", "message": "x"}}),
        *(build_unanswered("a", ended) for ended in ("canceled", "expired", "errored")),
    ):
        found = MessageBatchIndividualResponse.model_construct(**result)
        assert found.custom_id == "a"
    assert build_unanswered("a", "canceled")["result"] == {"type": "canceled"}
    assert build_unanswered("a", "errored")["result"]["error"]["error"]["type"] == "api_error"


def test_the_schema_of_the_body() -> None:
    """For /openapi.json, with the shape of a request."""
    assert BODY["required"] == ["requests"]
    assert BODY["properties"]["requests"]["items"]["required"] == ["custom_id", "params"]
