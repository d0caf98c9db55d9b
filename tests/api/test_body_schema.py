"""Bodies of the wrong shape are refused."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.body_schema import METADATA, BodySchema
from mlxrun.core.errors import RequestError
from tests.helpers.openai_api import CHAT, COMPLETION, HI, refused
from tests.helpers.tokenizers import (
    TOOLS,
    FakeModelInfo,
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


def test_a_key_of_metadata_that_is_too_long() -> None:
    schema = BodySchema({"metadata": METADATA})
    assert schema.check({"metadata": {"k" * 64: "x"}})
    with pytest.raises(RequestError, match="^metadata: '?k{60}.*is too long$") as found:
        schema.check({"metadata": {"k" * 65: "x"}})
    assert found.value.param == "metadata"
