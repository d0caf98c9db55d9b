"""Limits on bodies and prompts: the last value that is accepted, and the first that is not."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.prepared import PreparedRequest, check_message_counts, check_prompt_lengths
from mlxrun.core.errors import PromptTooLong, RequestError
from mlxrun.core.request import Request, SamplingParams


@pytest.mark.parametrize("name", ["messages", "input", "items"])
def test_messages_are_counted_in_each_field(name: str) -> None:
    check_message_counts({name: [{}] * 3}, 3)
    with pytest.raises(RequestError, match=rf"^{name}: 4 items are more than 3 \(server\.") as found:
        check_message_counts({name: [{}] * 4}, 3)
    assert found.value.param == name


@pytest.mark.parametrize(
    "body", [{"input": "longer than three"}, {"input": [0] * 4}, {"tools": [0] * 4}, [0] * 4, None]
)
def test_other_values_are_not_counted(body: Any) -> None:
    check_message_counts(body, 3)


def test_each_prompt_is_limited_by_itself() -> None:
    params = SamplingParams(max_tokens=1)
    requests = tuple(Request(id=str(size), prompt=(1,) * size, params=params) for size in (2, 5, 4))
    prepared = PreparedRequest("completion", requests, stops=(), seed=0, model="m")
    check_prompt_lengths(prepared, None)
    check_prompt_lengths(prepared, 5)
    with pytest.raises(PromptTooLong, match="^the prompt has 5 tokens; server.max_prompt_tokens is 4$"):
        check_prompt_lengths(prepared, 4)
