"""Input items are read into one form; what is unknown is refused or warned about."""

from __future__ import annotations

import logging

import pytest

from mlxrun.api.responses.request import (
    ResponseLookup,
)
from mlxrun.core.errors import RequestError
from tests.helpers.responses_api import messages, read, refused, text, user


def test_foreign_encrypted_reasoning_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A fallback is said."""
    with caplog.at_level(logging.WARNING):
        found = messages(input=[{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="}])
    assert found == []
    assert "encrypted_content of another server" in caplog.text


def test_unknown_parts_with_a_text_are_text_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown part types are warned of; without a text they are refused by name."""
    with caplog.at_level(logging.WARNING):
        assert (
            messages(input=[user({"type": "input_poem", "text": "p", "rhymes": True})])[0]["content"] == "p"
        )
    assert "content parts of unknown types" in caplog.text
    assert refused(input=[user({"type": "input_poem"})]).param == "input[0].content[0].type"


def test_a_warning_has_no_text_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """However many unknown types there are, it is logged once."""
    with caplog.at_level(logging.WARNING):
        messages(input=[user(*({"type": f"poem{i}", "text": "p"} for i in range(300)))])
    assert caplog.text.count("content parts") == 1 and "poem" not in caplog.text


def test_references_and_history_come_from_the_store() -> None:
    stored = {"id": "msg_1", "type": "message", "role": "user", "content": [text("old")]}
    lookup = ResponseLookup({"resp_1": (stored,)}.get, {"msg_1": stored}.get)
    what = read(lookup=lookup, input=[{"type": "item_reference", "id": "msg_1"}])
    assert what.context == (stored,)
    assert what.context[0] is stored, "items are shared, not copied"
    what = read(lookup=lookup, previous_response_id="resp_1")
    assert [m["content"] for m in what.chat["messages"]] == ["old", "hi"]
    assert what.context[0] is stored and len(what.context) == 2
    with pytest.raises(RequestError, match="no stored response 'resp_2'") as caught:
        read(lookup=lookup, previous_response_id="resp_2")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(RequestError, match=r"input\[0\].id: there is no stored item"):
        read(lookup=lookup, input=[{"type": "item_reference", "id": "msg_2"}])


def test_items_get_one_form_with_ids() -> None:
    """What is stored and listed does not depend on how it was sent."""
    short = read(input=[{"role": "user", "content": "hi"}]).context[0]
    long = read(input=[{**user(text("hi")), "id": "msg_mine"}]).context[0]
    assert short == {**long, "id": "msg_tin00"}
    assert read().context[0] == short
