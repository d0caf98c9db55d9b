"""OpenAI's own client on what /v1/responses stores: the background, conversations, and long ones."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from openai import OpenAI

from mlxrun.server.responses.response_runs import RESPONSES
from tests.helpers.served_model import ModelServer

SUM = "What is 12 + 30?"


def ask(client: OpenAI, value: Any, **fields: Any) -> Any:
    return client.responses.create(model="gpt-4o", input=value, **fields)


def poll(client: OpenAI, response: Any) -> Any:
    """As OpenAI's guide does it."""
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        response = client.responses.retrieve(response.id)
    return response


# In the background.


def test_a_response_is_polled(openai_client: OpenAI, served: ModelServer) -> None:
    made = ask(openai_client, SUM, background=True)
    assert made.background and made.status in ("queued", "in_progress", "completed")
    done = poll(openai_client, made)
    assert (done.status, done.output_text, done.id) == ("completed", "42", made.id)
    assert done.output_text == ask(openai_client, SUM).output_text
    again = ask(openai_client, "What did I ask?", previous_response_id=done.id)
    assert again.usage.input_tokens > done.usage.input_tokens
    assert not served.app[RESPONSES].tasks


def test_a_stream_that_broke_off_is_taken_up(openai_client: OpenAI) -> None:
    """From the event after the last one that came, and from the beginning."""
    seen = []
    stream = ask(openai_client, SUM, background=True, stream=True)
    for event in stream:
        seen.append(event)
        if len(seen) == 4:
            break
    stream.close()
    name, last = seen[0].response.id, seen[-1].sequence_number
    rest = list(openai_client.responses.retrieve(name, stream=True, starting_after=last))
    whole = list(openai_client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in (*seen, *rest)] == [event.to_dict() for event in whole]
    kinds = [event.type for event in whole]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert whole[-1].response.output_text == "42"  # type: ignore[union-attr]
    with openai_client.responses.stream(response_id=name, starting_after=last) as events:
        assert [event.type for event in events][-1] == "response.completed"


def test_one_is_cancelled(openai_client: OpenAI, served: ModelServer) -> None:
    made = ask(openai_client, SUM, background=True, extra_body={"ignore_eos": True})
    cancelled = openai_client.responses.cancel(made.id)
    assert cancelled.status == "cancelled" == openai_client.responses.retrieve(made.id).status
    assert openai_client.responses.cancel(made.id).status == "cancelled"
    assert not served.app[RESPONSES].running
    openai_client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(made.id)


def test_a_limit_makes_it_incomplete(openai_client: OpenAI) -> None:
    made = ask(openai_client, SUM, background=True, max_output_tokens=1)
    done = poll(openai_client, made)
    assert done.status == "incomplete" and done.incomplete_details.reason == "max_output_tokens"


# Conversations.


def test_a_conversation(openai_client: OpenAI) -> None:
    """Two turns, with and without a stream, with the prompt of the same items."""
    conversation = openai_client.conversations.create(
        metadata={"topic": "names"}, items=[{"role": "user", "content": "My name is Zora."}]
    )
    first = ask(openai_client, "What is my name?", conversation=conversation.id)
    assert "Zora" in first.output_text and first.conversation.id == conversation.id
    with openai_client.responses.stream(
        model="m", input="Say it again.", conversation={"id": conversation.id}
    ) as stream:
        second = stream.until_done().get_final_response()
    items = list(openai_client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    whole = [item.to_dict() for item in items[:-1]]
    assert ask(openai_client, whole).usage.input_tokens == second.usage.input_tokens  # type: ignore[union-attr]
    counted = openai_client.responses.input_tokens.count(conversation=conversation.id, input="x", model="m")
    assert counted.input_tokens > second.usage.input_tokens  # type: ignore[union-attr]


def test_the_items_of_a_conversation(openai_client: OpenAI) -> None:
    conversations = openai_client.conversations
    conversation = conversations.create()
    added = conversations.items.create(
        conversation.id, items=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    assert [item.type for item in added.data] == ["message", "message"]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    one = conversations.items.retrieve(added.first_id, conversation_id=conversation.id)
    assert one.to_dict() == added.data[0].to_dict()
    left = conversations.items.delete(added.first_id, conversation_id=conversation.id)
    assert left.id == conversation.id
    assert [item.id for item in conversations.items.list(conversation.id)] == [added.last_id]
    changed = conversations.update(conversation.id, metadata={"a": "b"})
    assert changed.metadata == {"a": "b"} == conversations.retrieve(conversation.id).metadata
    assert conversations.delete(conversation.id).deleted
    for use in (
        lambda: conversations.retrieve(conversation.id),
        lambda: conversations.items.list(conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            use()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, "x", conversation=conversation.id)
    assert caught.value.code == "conversation_not_found"


def test_a_conversation_in_the_background(openai_client: OpenAI) -> None:
    conversation = openai_client.conversations.create()
    done = poll(openai_client, ask(openai_client, SUM, conversation=conversation.id, background=True))
    assert done.output_text == "42"
    again = ask(openai_client, "Really?", conversation=conversation.id)
    assert again.usage.input_tokens > done.usage.input_tokens
    assert len(list(openai_client.conversations.items.list(conversation.id))) == 4


# What is too long.


def test_a_long_conversation_is_truncated_if_asked(openai_client: OpenAI) -> None:
    """The oldest turns are left out; without it the same is refused."""
    turns = [
        {"role": role, "content": f"{i} " + "word " * 200}
        for i in range(12)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": SUM}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, items)
    assert caught.value.code == "context_length_exceeded"
    response = ask(openai_client, items, truncation="auto", max_output_tokens=20)
    dropped = response.mlxrun["dropped_items"]
    assert response.truncation == "auto" and 0 < dropped < len(turns) and dropped % 2 == 0
    assert response.usage.input_tokens + 20 <= 4096
    rest = ask(openai_client, items[dropped:], max_output_tokens=20)
    assert (rest.output_text, rest.usage.input_tokens) == (response.output_text, response.usage.input_tokens)
    assert len(list(openai_client.responses.input_items.list(response.id, limit=100))) == len(items)


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
def test_every_kind_of_summary_is_accepted(openai_client: OpenAI, summary: Any) -> None:
    response = ask(openai_client, SUM, reasoning={"effort": "none", "summary": summary})
    assert response.output_text == "42" and response.reasoning.summary is None
