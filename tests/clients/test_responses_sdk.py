"""OpenAI's own client on /v1/responses of the embedded model: stream and not, sync and async, tools, images,
conversations."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from PIL import Image, ImageDraw

from mlxrun.server.responses.response_runs import RESPONSES
from tests.helpers.served_model import ModelServer

SUM = "What is 12 + 30?"
WEATHER = {
    "type": "function",
    "name": "fetch_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}
DUBLIN = "How is the weather in Dublin?"


def looking(colour: str = "red") -> list[Any]:
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((20, 20, 76, 76), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "What colour is the circle?"},
    ]
    return [{"role": "user", "content": parts}]


def ask(client: OpenAI, value: Any, **fields: Any) -> Any:
    return client.responses.create(model="gpt-4o", input=value, **fields)


def streamed(client: OpenAI, value: Any, **fields: Any) -> Any:
    """The response that the client's own accumulator makes of a stream, and the kinds of its events."""
    with client.responses.stream(model="gpt-4o", input=value, **fields) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_response(), kinds


def output(response: Any) -> Any:
    """What was answered, without the ids."""
    items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]
    for item in items:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return items


def test_an_answer_that_is_not_streamed(openai_client: OpenAI) -> None:
    response = ask(openai_client, SUM)
    assert response.output_text == "42"
    assert (response.status, response.model, response.object) == ("completed", "embedded", "response")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.output[0].type == "message" and response.output[0].role == "assistant"


def test_a_stream_is_the_same_answer(openai_client: OpenAI) -> None:
    whole = ask(openai_client, SUM)
    response, kinds = streamed(openai_client, SUM)
    assert output(response) == output(whole)
    assert response.output_text == "42"
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"


def test_the_same_answer_as_of_a_chat(openai_client: OpenAI) -> None:
    """One way to the prompt."""
    messages: Any = [
        {"role": "developer", "content": "Answer in capitals."},
        {"role": "user", "content": SUM},
    ]
    chat = openai_client.chat.completions.create(model="m", messages=messages)
    response = ask(openai_client, SUM, instructions="Answer in capitals.")
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_tool_round(openai_client: OpenAI) -> None:
    """The call, and the answer from its result: by items, and by previous_response_id."""
    first = ask(openai_client, DUBLIN, tools=[WEATHER])
    call = first.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "fetch_weather", '{"place": "Dublin"}')
    again, kinds = streamed(openai_client, DUBLIN, tools=[WEATHER])
    assert output(again) == output(first)
    assert "response.function_call_arguments.done" in kinds
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"weather": "sunny", "degrees": 21}',
    }
    items = [{"role": "user", "content": DUBLIN}, *(item.model_dump() for item in first.output), result]
    by_items = ask(openai_client, items, tools=[WEATHER])
    by_id = ask(openai_client, [result], tools=[WEATHER], previous_response_id=first.id)
    assert "unny" in by_items.output_text
    assert output(by_id) == output(by_items)
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


def test_reasoning(openai_client: OpenAI) -> None:
    """Effort switches it where the template can; the thought comes first, and is counted."""
    question = "What is 12 + 30 + 5?"
    response = ask(openai_client, question, reasoning={"effort": "medium"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "42" in response.output[0].content[0].text
    assert response.output_text == "47"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    again, kinds = streamed(openai_client, question, reasoning={"effort": "medium"})
    assert output(again) == output(response)
    assert "response.reasoning_text.delta" in kinds
    assert [item.type for item in ask(openai_client, SUM, reasoning={"effort": "none"}).output] == ["message"]


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_images(openai_client: OpenAI, colour: str) -> None:
    response = ask(openai_client, looking(colour))
    assert colour in response.output_text.lower()
    assert output(streamed(openai_client, looking(colour))[0]) == output(response)
    again = ask(openai_client, "What shape is it?", previous_response_id=response.id)
    assert "circle" in again.output_text.lower()


def test_an_image_in_the_output_of_a_tool(openai_client: OpenAI) -> None:
    """The model sees it: another colour is another prompt, and no image is fewer tokens."""
    call = {"type": "function_call", "call_id": "c1", "name": "shoot", "arguments": "{}"}

    def show(colour: str | None) -> Any:
        (message,) = looking(colour or "red")
        output = message["content"][:1] if colour else "nothing"
        result = {"type": "function_call_output", "call_id": "c1", "output": output}
        question = {"role": "user", "content": "What colour is the circle?"}
        return ask(openai_client, [question, call, result], top_logprobs=1)

    def read_logprobs(response: Any) -> list[float]:
        return [token.logprob for token in response.output[-1].content[0].logprobs]

    red, blue, nothing = show("red"), show("blue"), show(None)
    assert red.usage.input_tokens == blue.usage.input_tokens > nothing.usage.input_tokens
    assert read_logprobs(red) != read_logprobs(blue)


def test_a_conversation_reuses_its_prefix(openai_client: OpenAI) -> None:
    """Turn 2 finds turn 1, answer included."""
    first = ask(openai_client, "My name is Zora. " + "Remember it well. " * 30)
    second = ask(openai_client, "What is my name?", previous_response_id=first.id)
    assert "Zora" in second.output_text
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16


def test_stored_responses(openai_client: OpenAI, served: ModelServer) -> None:
    sent = ask(openai_client, SUM, metadata={"run": "7"})
    got = openai_client.responses.retrieve(sent.id)
    assert got.model_dump() == sent.model_dump()
    items = list(openai_client.responses.input_items.list(sent.id))
    assert [item.content[0].text for item in items] == [SUM]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        openai_client.responses.cancel(sent.id)
    openai_client.responses.delete(sent.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(sent.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, "x", previous_response_id=sent.id)
    assert caught.value.code == "previous_response_not_found"
    assert not served.app[RESPONSES].running


def test_tokens_are_counted(openai_client: OpenAI) -> None:
    for value in (SUM, looking()):
        counted = openai_client.responses.input_tokens.count(model="m", input=value, tools=[WEATHER])  # type: ignore[list-item]
        assert counted.input_tokens == ask(openai_client, value, tools=[WEATHER]).usage.input_tokens


def test_a_wrong_body(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}])
    assert caught.value.param == "input[0].content[0].file_id"


def test_cancelling_a_stream(openai_client: OpenAI, served: ModelServer) -> None:
    stream = openai_client.responses.create(
        model="m", input=SUM, stream=True, extra_body={"ignore_eos": True}
    )
    response_id, kinds = "", []
    for event in stream:
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta" and event.type not in kinds:
            assert openai_client.responses.cancel(response_id).status == "cancelled"
        kinds.append(event.type)
    assert kinds[-1] == "response.cancelled"
    assert openai_client.responses.retrieve(response_id).status == "cancelled"
    assert not served.app[RESPONSES].running


async def test_different_requests_at_once(served: ModelServer, openai_client: OpenAI) -> None:
    """A text, an image, tools and a thought together: each as it is alone."""
    received: list[tuple[Any, dict[str, Any]]] = [
        (SUM, {}),
        (looking(), {}),
        (DUBLIN, {"tools": [WEATHER]}),
        ("What is 12 + 30 + 5?", {"reasoning": {"effort": "low"}}),
    ]
    alone = [
        output(await asyncio.to_thread(ask, openai_client, value, **fields)) for value, fields in received
    ]
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as many:

        async def whole(value: Any, fields: dict[str, Any]) -> Any:
            return output(await many.responses.create(model="m", input=value, **fields))

        async def stream(value: Any, fields: dict[str, Any]) -> Any:
            async with many.responses.stream(model="m", input=value, **fields) as events:
                return output(await events.get_final_response())

        for how in (whole, stream):
            together = await asyncio.gather(*(how(value, fields) for value, fields in received))
            assert together == alone
