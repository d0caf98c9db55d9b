"""Bodies and tools of the wrong shape are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.openai_api import CHAT, COMPLETION, HI, refused
from tests.helpers.tokenizers import (
    TOOLS,
    FakeModelInfo,
)


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": None}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({}, "tools[0].type"),
    ],
)
def test_what_a_tool_lacks_is_missing(tool: dict[str, Any], where: str) -> None:
    """Not null where nothing was sent."""
    error = refused(CHAT, {"messages": HI, "tools": [tool]})
    assert (str(error), error.param, error.code) == (f"{where}: missing", where, "missing_field")
    assert "expected object, got string" in str(
        refused(CHAT, {"messages": HI, "tools": [{"type": "function", "function": "f"}]})
    )


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_a_body_is_an_object(body: Any) -> None:
    assert "expected an object" in str(refused(CHAT, body))


def test_deep_nesting_is_refused_not_a_crash() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for field in ("temperature", "metadata", "tools", "stop", "tool_choice", "chat_template_kwargs"):
        assert refused(CHAT, {"messages": HI, field: deep})
    assert refused(CHAT, {"messages": deep})
    assert refused(COMPLETION, {"prompt": deep})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}
    assert refused(CHAT, {"messages": HI, "tools": [tool]}, FakeModelInfo(chat_template=TOOLS))
