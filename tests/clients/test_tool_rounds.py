"""Three rounds of tools on the embedded model: by both packages, and as a job.

One question needs three calls, one after the other; each result goes back, and the answer has all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from mlxrun.api.openai.request import prepare_request
from mlxrun.cli.main import main
from tests.helpers.batch_fakes import by_id, write_job
from tests.helpers.served_model import ModelServer

Json = dict[str, Any]

QUESTION = "What is the weather in Dublin?\nMultiply 12 by 7.\nSet a timer for 5 minutes."
CALLS = [("get_weather", {"city": "Dublin"}), ("multiply", {"a": 12, "b": 7}), ("set_timer", {"minutes": 5})]
RESULTS = {
    "get_weather": '{"temperature": 21, "sky": "sunny"}',
    "multiply": '{"result": 84}',
    "set_timer": '{"ends": "12:30"}',
}
ANSWER = "It is 21 degrees and sunny in Dublin. The result is 84. The timer ends at 12:30."
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def function(name: str, about: str, **kinds: str) -> Json:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [
    function("get_weather", "Get the weather in a city.", city="string"),
    function("multiply", "Multiply two numbers.", a="integer", b="integer"),
    function("set_timer", "Start a timer.", minutes="integer"),
]


@dataclass
class Round:
    """One answer: what a client has put together of a stream."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)  # index: id, name, arguments

    @property
    def reported(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls.values()]


# -- chat/completions -------------------------------------------------------------------------------------


def body(messages: Sequence[Json], **more: Any) -> Json:
    return {"messages": list(messages), "tools": TOOLS, "max_tokens": 128, "temperature": 0, **more}


def streamed(client: OpenAI, messages: Sequence[Json], **more: Any) -> Round:
    """One answer from its chunks; a call's id and name come once and first."""
    made = Round()
    received = {"extra_body": more} if more else {}
    for chunk in client.chat.completions.create(model="m", stream=True, **body(messages), **received):
        delta, made.finish = chunk.choices[0].delta, chunk.choices[0].finish_reason
        made.text += delta.content or ""
        made.reasoning += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or []:
            if part.index not in made.calls:
                assert part.id and part.function.name and part.index == len(made.calls)
                made.calls[part.index] = [part.id, part.function.name, ""]
            else:
                assert not part.id and not part.function.name
            made.calls[part.index][2] += part.function.arguments or ""
    return made


def turn(made: Round, results: dict[str, str]) -> list[Json]:
    """An answer as history, with the results of its calls."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in made.calls.values()
    ]
    said: Json = {"role": "assistant", "content": made.text or None, "tool_calls": calls}
    if made.reasoning:
        said["reasoning_content"] = made.reasoning
    return [
        said,
        *(
            {"role": "tool", "tool_call_id": id, "content": results[name]}
            for id, name, _ in made.calls.values()
        ),
    ]


def converse(
    client: OpenAI, results: dict[str, str] = RESULTS, **more: Any
) -> tuple[list[Round], list[list[Json]]]:
    """All rounds, and the history that each was asked with."""
    messages: list[Json] = [{"role": "user", "content": QUESTION}]
    rounds, received = [], []
    for _ in range(len(CALLS) + 1):
        received.append(list(messages))
        rounds.append(streamed(client, messages, **more))
        if not rounds[-1].calls:
            break
        messages += turn(rounds[-1], results)
    return rounds, received


@pytest.mark.parametrize("more", [{}, THINKING], ids=["plain", "thinking"])
def test_chat(openai_client: OpenAI, more: Json) -> None:
    """The right tool with the right arguments, its result, and the answer; a thought is a
    thought."""
    rounds, _ = converse(openai_client, **more)
    assert [made.reported for made in rounds] == [*([call] for call in CALLS), []]
    assert [made.finish for made in rounds] == ["tool_calls"] * 3 + ["stop"]
    assert [made.text for made in rounds] == ["", "", "", ANSWER]
    assert all(made.reasoning for made in rounds) == bool(more)
    assert not any("<" in made.text + made.reasoning for made in rounds)
    ids = [id for made in rounds for id, _, _ in made.calls.values()]
    assert len(set(ids)) == len(CALLS)


def test_other_results_are_another_answer(openai_client: OpenAI) -> None:
    """The twin: what the tools say is what the answer says."""
    other = RESULTS | {"get_weather": '{"temperature": 7, "sky": "foggy"}', "multiply": '{"result": 85}'}
    rounds, _ = converse(openai_client, other)
    assert [made.reported for made in rounds] == [*([call] for call in CALLS), []]
    assert rounds[-1].text == ANSWER.replace("21", "7").replace("sunny", "foggy").replace("84", "85")


def test_calls_that_are_forbidden_do_not_come(openai_client: OpenAI) -> None:
    """A second twin."""
    made = streamed(openai_client, [{"role": "user", "content": QUESTION}], tool_choice="none")
    assert not made.calls and made.finish == "stop"


def test_the_history_reaches_the_template_natively(openai_client: OpenAI, served: ModelServer) -> None:
    """Arguments as an object, written once; results behind the calls they answer."""
    _, received = converse(openai_client)
    prepared = served.call(prepare_request("/v1/chat/completions", body(received[-1]), served.state.context))
    prompt = prepared.prompts[0]
    at = 0
    for name, arguments in CALLS:
        call = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
        for text in (
            f"<tool_call>\n{call}\n</tool_call>",
            f"<tool_response>\n{RESULTS[name]}\n</tool_response>",
        ):
            found = prompt.find(text, at)
            assert found > 0, (text, prompt[at:])
            at = found + len(text)
    assert '\\"' not in prompt


# -- messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_messages(anthropic_client: Anthropic, thinking: bool) -> None:
    """The same by Anthropic's package; the rounds go back as they came."""
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in TOOLS
    ]
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinking else {}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    reported, reasons, text = [], [], ""
    for _ in range(len(CALLS) + 1):
        with anthropic_client.messages.stream(
            model="m", max_tokens=2048, messages=messages, tools=tools, extra_body={"temperature": 0}, **more
        ) as stream:
            deltas = [event.type for event in stream]
            message = stream.get_final_message()
        kinds = [block.type for block in message.content]
        assert ("thinking" in kinds and "thinking" in deltas) is thinking
        calls = [block for block in message.content if block.type == "tool_use"]
        reported.append([(call.name, call.input) for call in calls])
        reasons.append(message.stop_reason)
        text += "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.name]} for call in calls
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert reported == [*([call] for call in CALLS), []]
    assert reasons == ["tool_use"] * 3 + ["end_turn"]
    assert text == ANSWER


# -- batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, THINKING], ids=["plain", "thinking"])
def test_batch(openai_client: OpenAI, tmp_path: Path, more: Json) -> None:
    """The same conversation's lines give the same calls, thoughts and answer."""
    rounds, received = converse(openai_client, **more)
    lines = [
        {
            "custom_id": f"round {i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body(messages, **more),
        }
        for i, messages in enumerate(received)
    ]
    job = write_job(tmp_path, lines)
    assert main(["batch", str(job)]) == 0
    records = by_id(tmp_path / "job.out.jsonl")
    assert len(records) == len(CALLS) + 1
    for i, made in enumerate(rounds):
        choice = json.loads(records[f"round {i}"])["response"]["body"]["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == made.reported
        assert (message.get("reasoning_content") or "") == made.reasoning
        assert (message["content"] or "") == made.text
        assert choice["finish_reason"] == made.finish
