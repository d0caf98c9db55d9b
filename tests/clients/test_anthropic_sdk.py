"""Anthropic's own client on the embedded model: stream and not, sync and async, thoughts, tools, images.

What the prefix cache must find again is here too, as it needs the real engine.
"""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, NotFoundError
from anthropic.types import Message
from PIL import Image, ImageDraw

from tests.helpers.anthropic_bodies import BILLING, claude_code
from tests.helpers.served_model import ModelServer

Json = dict[str, Any]

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
THINK = [{"role": "user", "content": "What is 12 + 30 + 5?"}]
ENABLED = {"type": "enabled", "budget_tokens": 1024}
WEATHER = {
    "name": "fetch_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
DUBLIN = [{"role": "user", "content": "How is the weather in Dublin?"}]
GREEDY = {"temperature": 0}  # the package has no such argument any more, its API has the field


def picture(colour: str = "red") -> Json:
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((20, 20, 76, 76), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def looking(colour: str) -> list[Any]:
    text = {"type": "text", "text": "What colour is the circle?"}
    return [{"role": "user", "content": [picture(colour), text]}]


def received(messages: Any, **fields: Any) -> Json:
    return {"model": "claude-x", "max_tokens": 64, "messages": messages, "extra_body": GREEDY, **fields}


def ask(client: Anthropic, messages: Any, **fields: Any) -> Message:
    return client.messages.create(**received(messages, **fields))


def streamed(client: Anthropic, messages: Any, **fields: Any) -> Message:
    """The message that the client's own accumulator makes of a stream."""
    with client.messages.stream(**received(messages, **fields)) as stream:
        return stream.get_final_message()


def said(message: Message) -> list[Json]:
    """The blocks without their ids, and why the answer ended."""
    blocks = [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]
    return [*blocks, {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}]


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def tokens_of(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


RECEIVED: dict[str, tuple[list[Any], Json, str]] = {
    "sum": (SUM, {}, "42"),
    "system": (SUM, {"system": [{"type": "text", "text": "Answer in one word."}]}, ""),
    "thought": (THINK, {"thinking": ENABLED, "max_tokens": 1025}, "47"),
    "hidden": (THINK, {"thinking": {**ENABLED, "display": "omitted"}, "max_tokens": 1025}, "47"),
    "tool": (DUBLIN, {"tools": [WEATHER]}, ""),
    "stop": (SUM, {"stop_sequences": ["2"]}, ""),
    "short": (SUM, {"max_tokens": 1}, ""),
    "image": (looking("red"), {}, "red"),
}


@pytest.mark.parametrize("name", RECEIVED)
async def test_all_ways_to_ask(served: ModelServer, anthropic_client: Anthropic, name: str) -> None:
    """Whole and streamed, sync and async say the same; the count is that of the prompt."""
    messages, fields, wanted = RECEIVED[name]
    whole = ask(anthropic_client, messages, **fields)
    assert wanted in text_of(whole)
    assert said(streamed(anthropic_client, messages, **fields)) == said(whole)
    async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        assert said(await other.messages.create(**received(messages, **fields))) == said(whole)
        async with other.messages.stream(**received(messages, **fields)) as stream:
            assert said(await stream.get_final_message()) == said(whole)
        events = await other.messages.create(**received(messages, **fields, stream=True))
        kinds = [event.type async for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    counted = {k: v for k, v in fields.items() if k in ("system", "tools", "thinking")}
    counts = anthropic_client.messages.count_tokens(model="claude-x", messages=messages, **counted)
    assert counts.input_tokens == tokens_of(whole)
    assert whole.usage.output_tokens > 0 and whole.id.startswith("msg_") and whole.role == "assistant"


def test_why_an_answer_ended(anthropic_client: Anthropic) -> None:
    assert ask(anthropic_client, SUM).stop_reason == "end_turn"
    assert ask(anthropic_client, SUM, max_tokens=1).stop_reason == "max_tokens"
    stopped = ask(anthropic_client, SUM, stop_sequences=["zzz", "2"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "2")
    assert "2" not in text_of(stopped)


def test_reasoning_is_a_block_of_its_own(anthropic_client: Anthropic) -> None:
    """And it comes back in the next turn, shown or not."""
    shown = ask(anthropic_client, THINK, thinking=ENABLED, max_tokens=1025)
    hidden = ask(anthropic_client, THINK, thinking={**ENABLED, "display": "omitted"}, max_tokens=1025)
    assert [block.type for block in shown.content] == ["thinking", "text"]
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert shown.content[0].thinking and not hidden.content[0].thinking  # type: ignore[union-attr]
    assert 0 < shown.usage.output_tokens_details.thinking_tokens < shown.usage.output_tokens  # type: ignore[union-attr]
    assert all(
        block.type == "text" for block in ask(anthropic_client, THINK, thinking={"type": "disabled"}).content
    )
    turns = [[*THINK, {"role": "assistant", "content": message.content}, *SUM] for message in (shown, hidden)]
    one, other = (anthropic_client.messages.count_tokens(model="m", messages=turn) for turn in turns)
    assert one.input_tokens == other.input_tokens
    between = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
    cut = ask(anthropic_client, THINK, thinking=ENABLED, max_tokens=3, tools=[WEATHER], extra_headers=between)
    assert [block.type for block in cut.content] == ["thinking"] and cut.stop_reason == "max_tokens"


@pytest.mark.parametrize("way", [ask, streamed])
def test_a_round_of_tools(anthropic_client: Anthropic, way: Any) -> None:
    """The call has objects, its result comes back natively, and the answer has it."""
    first = way(anthropic_client, DUBLIN, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "fetch_weather", {"place": "Dublin"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny", "degrees": 21}'}
    turns = [*DUBLIN, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = way(anthropic_client, turns, tools=[WEATHER])
    assert second.stop_reason == "end_turn" and "unny" in text_of(second)
    assert (second.usage.cache_read_input_tokens or 0) > 0


def test_images_are_seen(anthropic_client: Anthropic) -> None:
    """Also in the result of a tool; another picture is another answer."""
    for colour in ("red", "blue", "green"):
        assert colour in text_of(ask(anthropic_client, looking(colour)))
    call = {"type": "tool_use", "id": "toolu_1", "name": "screenshot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture("blue")]}
    ask_for = {"type": "text", "text": "What colour is the circle?"}
    turns = [
        {"role": "user", "content": "Take a picture."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, ask_for]},
    ]
    answer = ask(anthropic_client, turns)
    assert answer.content
    assert anthropic_client.messages.count_tokens(model="m", messages=turns).input_tokens == tokens_of(answer)


def post(served: ModelServer, path: str, body: Json) -> Json:
    request = urllib.request.Request(
        served.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: Json = json.load(response)
    return found


def test_the_other_surface_says_the_same(served: ModelServer, anthropic_client: Anthropic) -> None:
    """One conversation, one prompt, one answer."""
    ours = ask(anthropic_client, SUM, system="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, *SUM]
    theirs = post(served, "/v1/chat/completions", {"messages": chat, "temperature": 0})
    assert theirs["choices"][0]["message"]["content"] == text_of(ours)
    assert theirs["usage"]["prompt_tokens"] == tokens_of(ours)


def test_an_answer_that_was_begun(anthropic_client: Anthropic) -> None:
    """It goes on as the whole answer did; count_tokens counts the same prompt."""
    whole = text_of(ask(anthropic_client, SUM))
    turns = [*SUM, {"role": "assistant", "content": whole[:6].rstrip()}]
    made = ask(anthropic_client, turns)
    assert text_of(made) == whole[len(whole[:6].rstrip()) :]
    assert text_of(streamed(anthropic_client, turns)) == text_of(made)
    assert anthropic_client.messages.count_tokens(model="m", messages=turns).input_tokens == tokens_of(made)
    assert text_of(ask(anthropic_client, [*turns, *SUM])) == whole  # the twin: a turn that is over


# -- what is found again --------------------------------------------------------------------------------


def cached(message: Message) -> int:
    return message.usage.cache_read_input_tokens or 0


@pytest.mark.parametrize("words", [8, 300])
def test_the_second_turn_is_a_hit(anthropic_client: Anthropic, words: int) -> None:
    """The first turn's prompt is found again, short or long; another conversation finds nothing of it."""
    first = [{"role": "user", "content": f"Turn {words}: " + " ".join(f"word{i}" for i in range(words))}]
    one = ask(anthropic_client, first, max_tokens=8)
    turns = [*first, {"role": "assistant", "content": one.content}, *SUM]
    two = ask(anthropic_client, turns, max_tokens=8)
    assert cached(two) >= tokens_of(one) - 8
    assert tokens_of(two) > tokens_of(one)
    foreign = [{"role": "user", "content": "Other"}, *turns[1:]]
    assert cached(ask(anthropic_client, foreign, max_tokens=8)) < 16


def test_three_system_prompts_in_turn(anthropic_client: Anthropic) -> None:
    """Agents alternate between theirs, and each is found again."""
    prompts = [f"You are agent {name}. " + f"Rule of {name}. " * 20 for name in ("one", "two", "three")]
    for rounds in range(3):
        for system in prompts:
            question = [{"role": "user", "content": f"Question {rounds}?"}]
            answer = ask(anthropic_client, question, system=system, max_tokens=4)
            only = anthropic_client.messages.count_tokens(model="m", messages=question).input_tokens
            if rounds:
                assert cached(answer) >= tokens_of(answer) - only - 8


def test_the_billing_line_costs_nothing(anthropic_client: Anthropic) -> None:
    """Two requests that differ in it: all is found but what is always computed. A user's is text."""
    rules = "Rules: " + "be brief. " * 60
    found = []
    for cch in ("fa690", "00bb1"):
        system = [{"type": "text", "text": BILLING.format(cch)}, {"type": "text", "text": rules}]
        found.append(ask(anthropic_client, SUM, system=system, max_tokens=4))
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert cached(found[1]) >= 0.97 * tokens_of(found[1])
    for cch in ("11111", "22222"):
        said_by_user = [{"role": "user", "content": f"{BILLING.format(cch)} {rules}"}]
        other = ask(anthropic_client, said_by_user, max_tokens=4)
    assert cached(other) < 0.5 * tokens_of(other)


# -- agents ---------------------------------------------------------------------------------------------


def test_bodies_of_claude_code(anthropic_client: Anthropic) -> None:
    """The documented shape, through the package's beta surface."""
    body = claude_code("fa690")
    betas = ["claude-code-20250219", "context-management-2025-06-27"]
    stream = body.pop("stream")
    assert stream
    with anthropic_client.beta.messages.stream(**body | {"max_tokens": 16}, betas=betas) as events:
        message = events.get_final_message()
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert message.context_management is not None and message.context_management.applied_edits == []
    counted = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
    counts = anthropic_client.beta.messages.count_tokens(**counted, betas=betas)
    read = message.usage.cache_read_input_tokens or 0
    assert counts.input_tokens == message.usage.input_tokens + read


def test_models(anthropic_client: Anthropic) -> None:
    found = anthropic_client.models.list()
    assert [model.type for model in found.data] == ["model"] and not found.has_more
    with pytest.raises(NotFoundError):
        anthropic_client.post("/v1/messages/nothing", cast_to=object, body={})
