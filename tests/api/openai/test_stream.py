"""OpenAI's stream chunks: the shape of each, and that a stream says what the response does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.choice import Choice
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.openai.response import build_response
from mlxrun.api.openai.stream import ChunkWriter, join_deltas
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.core.request import FinishReason, TokenEvent, TokenLogprob
from tests.helpers.bracket_formats import TOOL, Brackets
from tests.helpers.prompt_scores import make_prompt_logprobs
from tests.helpers.tokenizers import TOOLS, FakeModelInfo, ids_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


MODEL_INFO = FakeModelInfo(chat_template=TOOLS)


def make(url: str = CHAT, **fields: Any) -> PreparedRequest:
    body = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    context = ApiContext(MODEL_INFO, Config(), MediaLoader(Config().media, None), Brackets())
    return asyncio.run(
        prepare_request(url, {"stream": True, "seed": 1, **body, **fields}, context, stream=True)
    )


def stream(prepared: PreparedRequest, cuts: Sequence[int], *texts: str) -> tuple[list[Any], list[Choice]]:
    """The chunks as objects, and the choices. Each text's tokens come in events that end at `cuts`."""
    chunks = ChunkWriter(prepared, "x", 5, "fp_1")
    choices, made = [], []
    for index, text in enumerate(texts):
        choice, ids = Choice(prepared, index, MODEL_INFO), ids_of(text)
        logs = tuple(TokenLogprob(-0.5 - i, ((t, -0.5),)) for i, t in enumerate(ids))
        if prepared.requests[index].params.logprobs is None:
            logs = ()
        scores = make_prompt_logprobs(prepared.requests[index])
        half = len(scores) // 2
        for each in (scores[:half], scores[half:]):
            made += chunks.write(choice, choice.feed(TokenEvent("r", prompt_logprobs=each)))
        bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
        for start, end in zip(bounds, bounds[1:], strict=False):
            made += chunks.write(choice, choice.feed(TokenEvent("r", ids[start:end], logs[start:end])))
            if choice.stopped:
                break
        else:
            made += chunks.write(choice, choice.feed(TokenEvent("r", finish=FinishReason.LENGTH)))
        choices.append(choice)
    if prepared.include_usage:
        made.append(chunks.write_usage())
    return [json.loads(chunk) for chunk in made], choices


def gathered(made: Sequence[Any], prepared: PreparedRequest) -> list[Any]:
    """What a client adds up: the choices of the whole response."""
    choices: dict[int, Any] = {}
    for chunk in made:
        for part in chunk["choices"]:
            empty: Any = {"index": part["index"], "logprobs": None, "finish_reason": None}
            of = choices.setdefault(
                part["index"], empty | ({"text": ""} if "text" in part else {"message": {}})
            )
            assert of["finish_reason"] is None, "nothing comes after the last chunk of a choice"
            of["finish_reason"] = part["finish_reason"]
            if "text" in part:
                of["text"] += part["text"]
            else:
                add(of["message"], part["delta"])
            for key, tokens in (part["logprobs"] or {}).items():
                of["logprobs"] = of["logprobs"] or {}
                old = of["logprobs"].get(key)
                of["logprobs"][key] = tokens if not old else old + tokens
            for key in ("prompt_token_ids", "token_ids"):
                if key in part:
                    of[key] = [*of.get(key, ()), *part[key]]
    return [choices[index] for index in sorted(choices)]


def add(message: Any, delta: Any) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    assert part["function"]["arguments"] == "", "the first delta of a call has none"
                    calls.append({k: v for k, v in part.items() if k != "index"})
                else:
                    assert "id" not in part and "name" not in part["function"]
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        elif key in ("content", "reasoning_content") and isinstance(message.get(key), str):
            message[key] += value
        else:
            message[key] = value


def test_the_chunks_of_a_chat() -> None:
    """Golden: role first, deltas, the reason, usage with no choices."""
    prepared = make(stream_options={"include_usage": True})
    made, _ = stream(prepared, [1], "ab")
    head = {
        "id": "chatcmpl-x",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "fake",
        "system_fingerprint": "fp_1",
    }

    def chunk(delta: Any, finish: str | None = None) -> Any:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice], "usage": None}

    prompt = prepared.prompt_tokens
    assert made == [
        chunk({"role": "assistant", "content": "", "refusal": None}),
        chunk({"content": "a"}),
        chunk({"content": "b"}),
        chunk({}, "length") | {"mlxrun": {"seed": 1}},
        head
        | {
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 2,
                "total_tokens": prompt + 2,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        },
    ]


def test_the_chunks_of_a_call() -> None:
    """Id and name with empty arguments, then fragments; finish_reason tool_calls; content null."""
    made, _ = stream(make(tools=[TOOL], stop="!"), [1, 2], "(ab)!")
    deltas = [chunk["choices"][0]["delta"] for chunk in made]
    name = {"name": "f", "arguments": ""}
    assert deltas == [
        {"role": "assistant", "content": None, "refusal": None},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": name}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "b"}}]},
        {},
    ]
    assert made[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all("usage" not in chunk for chunk in made)


def test_a_completion_begins_with_its_echo() -> None:
    made, _ = stream(make(COMPLETION, prompt=["one ", "two "], echo=True), [], "a", "b")
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in made] == [
        *((0, "one "), (0, "a"), (0, "")),
        *((1, "two "), (1, "b"), (1, "")),
    ]
    assert {c["object"] for c in made} == {"text_completion"} and made[0]["id"] == "cmpl-x"


def test_an_answer_of_nothing_has_its_role_and_its_end() -> None:
    made, _ = stream(make(), [], "")
    assert [chunk["choices"][0]["delta"] for chunk in made] == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]


DELTAS = st.builds(
    Delta,
    st.sampled_from(["content", "reasoning", "call"]),
    st.text(max_size=6) | st.sampled_from(["\0", '"', "\\u0000", "\u2028", "</s>", "\x7f"]),
    st.integers(0, 3),
)


@given(DELTAS.filter(lambda delta: delta.text), st.booleans(), st.sampled_from([CHAT, COMPLETION]))
def test_a_written_chunk_equals_the_object(delta: Delta, usage: bool, url: str) -> None:
    """The cheap way gives, byte for byte, what the object gives, whatever the delta is."""
    if url == COMPLETION:
        delta = dataclasses.replace(delta, kind="content", index=0)
    prepared = make(url, n=2, **({"stream_options": {"include_usage": True}} if usage else {}))
    for model in ("m", '"', "\0", '"\\u0000"'):
        chunks = ChunkWriter(dataclasses.replace(prepared, model=model), "x", 5)
        choice = Choice(prepared, 1, MODEL_INFO)
        for _ in range(2):  # the frame is made, then used again
            *_, made = chunks.write(choice, [delta])
            expected = chunks.make_chunk(1, chunks.make_content(delta))
            assert made == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    assert "\n" not in made and "\r" not in made  # nothing that would end a line of an event stream


def test_deltas_are_joined_but_never_across_kinds_or_calls() -> None:
    call = Delta("call", "", 0, "id0", "f")
    deltas = [
        *(
            Delta("content", "a"),
            Delta("content", "b"),
            Delta("content", ""),
            Delta("reasoning", "c"),
            Delta("content", "d"),
        ),
        *(call, Delta("call", "1", 0), Delta("call", "2", 0)),
        *(dataclasses.replace(call, index=1, text="{"), Delta("call", "}", 1)),
    ]
    assert list(join_deltas(deltas)) == [
        *(Delta("content", "ab"), Delta("reasoning", "c"), Delta("content", "d")),
        *(call, Delta("call", "12", 0)),
        *(dataclasses.replace(call, index=1), Delta("call", "{}", 1)),
    ]


TEXTS = st.text(alphabet="ab~[]()E\u4f60\U0001f600", max_size=14)


EXTRAS = [(logs, ids, counts) for logs in (False, True) for ids in (False, True) for counts in (False, True)]


@given(
    TEXTS,
    TEXTS,
    st.lists(st.integers(0, 20), max_size=5),
    st.sampled_from(EXTRAS),
    st.sampled_from(["chat", "echo", "plain"]),
)
def test_a_stream_has_the_content_of_the_response(
    one: str, two: str, cuts: list[int], extras: tuple[bool, bool, bool], kind: str
) -> None:
    """The prompt, text, reasoning, calls, logprobs, token ids, reasons and usage, however the tokens came."""
    logs, ids, counts = extras
    chat = kind == "chat"
    wanted: dict[str, Any] = {"logprobs": 1} if logs else {}
    if chat:
        wanted = {"logprobs": True, "top_logprobs": 1} if logs else {}
        wanted["tools"] = [TOOL]
    elif kind == "echo":
        wanted["echo"] = True
    url = CHAT if chat else COMPLETION
    options = {"include_usage": True, "continuous_usage_stats": counts}
    prepared = make(url, n=2, stop="aE", stream_options=options, return_token_ids=ids, **wanted)
    made, choices = stream(prepared, cuts, one, two)
    whole = build_response(prepared, choices, "x", 5, "fp_1")
    for choice in whole["choices"]:
        if choice["logprobs"] and not choice["logprobs"]["content" if chat else "tokens"]:
            choice["logprobs"] = None  # no token, so no chunk says so
    expected, got = whole["choices"], gathered(made, prepared)
    for choice in [*expected, *got] if chat else []:
        choice["message"]["content"] = choice["message"]["content"] or ""  # null if there are calls alone
    assert got == expected
    assert made[-1]["usage"] == whole["usage"] and made[-1]["choices"] == []
    assert {chunk["id"] for chunk in made} == {whole["id"]}
    assert [chunk["prompt_token_ids"] for chunk in made if "prompt_token_ids" in chunk] == (
        [whole["prompt_token_ids"]] if ids and chat else []
    )
    assert all((chunk["usage"] is not None) is counts for chunk in made[:-1])


def test_token_counts_grow_with_every_chunk() -> None:
    """Each chunk has those of its choice; the chunk of all of them comes only if it is wanted too."""
    prepared = make(n=2, stream_options={"continuous_usage_stats": True})
    made, choices = stream(prepared, [1, 2], "abc", "de")
    prompt = len(prepared.requests[0].prompt)
    counts = [(chunk["choices"][0]["index"], chunk["usage"]["completion_tokens"]) for chunk in made]
    assert counts == [(0, 1), (0, 1), (0, 2), (0, 3), (0, 3), (1, 1), (1, 1), (1, 2), (1, 2)]
    assert {chunk["usage"]["prompt_tokens"] for chunk in made} == {prompt}
    assert made[-1]["usage"]["total_tokens"] == prompt + choices[1].completion_tokens


def test_the_comparison_sees_a_lost_delta() -> None:
    """Mutation: without one of the chunks it does not hold."""
    prepared = make(logprobs=True)
    made, choices = stream(prepared, [1, 2], "abc")
    expected = build_response(prepared, choices, "x", 5)["choices"]
    assert gathered(made, prepared) == expected
    for at in range(1, 4):
        assert gathered(made[:at] + made[at + 1 :], prepared) != expected


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_logprobs_come_with_the_text_that_they_are_of(url: str) -> None:
    """Tokens that are half a character, or that may begin a stop string, wait; none comes twice."""
    wanted: dict[str, Any] = {"logprobs": True} if url == CHAT else {"logprobs": 1}
    prepared = make(url, stop="xyz", **wanted)
    made, _ = stream(prepared, range(30), "a\u4f60xyb")
    seen = []
    for chunk in made:
        part = chunk["choices"][0]
        logprobs = part["logprobs"]
        count = len(logprobs["content" if url == CHAT else "tokens"]) if logprobs else 0
        seen.append((part["delta"].get("content", "") if url == CHAT else part["text"], count))
    assert [entry for entry in seen if any(entry)] == [("a", 1), ("\u4f60", 3), ("xyb", 3)]
