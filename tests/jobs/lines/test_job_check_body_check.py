"""Bodies that no model could answer, told without one."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.jobs.lines.job_check import check_line_body
from mlxrun.jobs.lines.job_file import CHAT, COMPLETION, MESSAGE, RESPONSE, JobLine

USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": USER, "max_tokens": 5, "tools": [TOOL], "thinking_budget": 9}),
        (COMPLETION, {"prompt": ["a", "b"], "temperature": 0, "n": 2}),
        (RESPONSE, {"input": "hello", "max_output_tokens": 5, "reasoning": {"effort": "low"}}),
        (RESPONSE, {"input": USER, "tools": [{"type": "function", "name": "f", "parameters": {}}]}),
        (MESSAGE, {"model": "m", "messages": USER, "max_tokens": 5, "thinking": {"type": "adaptive"}}),
    ],
)
def test_bodies_that_a_model_may_answer(url: str, body: dict[str, Any]) -> None:
    check_line_body(JobLine(1, "a", url, body))


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, {"messages": USER, "max_token": 20}, "max_token"),
        (CHAT, {"messages": USER, "max_tokens": "20"}, "max_tokens"),
        (CHAT, {"messages": [{"role user": None}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"prompt": "x"}, "prompt"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        (COMPLETION, {"temperature": 0}, "prompt"),
        (COMPLETION, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (RESPONSE, {"input": 3}, "input"),
        (RESPONSE, {"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        (RESPONSE, {"input": "x", "max_tokens": 3}, "max_tokens"),
        (MESSAGE, {"model": "m", "messages": USER}, "max_tokens"),
        (MESSAGE, {"model": "m", "messages": [{"role user": None}], "max_tokens": 3}, "messages[0].role"),
    ],
)
def test_bodies_that_no_model_answers(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_line_body(JobLine(1, "a", url, body))
    assert str(caught.value.param).replace(".0", "[0]") == param
