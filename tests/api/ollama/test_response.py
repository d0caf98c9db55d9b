"""Answers as Ollama writes them: lines and whole answers have the same text, calls and counts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.choice import Choice
from mlxrun.api.ollama.response import (
    AnswerTimes,
    OllamaWriter,
    build_embeddings,
    build_error,
    count_nanoseconds,
    describe_model,
    format_count,
    list_capabilities,
    list_loaded,
    list_tags,
)
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.raw_prompts import FORMATS
from mlxrun.config.settings import Config
from mlxrun.core.errors import Overloaded
from mlxrun.core.model_summary import ModelSummary
from mlxrun.core.request import FinishReason, LoraAdapter, PooledModel, TokenEvent
from tests.helpers.infill_models import make_infill_model
from tests.helpers.openai_api import MODEL_INFO, TOOL, logged
from tests.helpers.openai_api import chat as prepare_chat
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo, ids_of

TIMES = AnswerTimes(2.5, 0.5, 1.0)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'
ANSWER = f"<think>hm</think>Let me see.\n{CALL}\n{CALL}"
JOINED = ("content", "thinking")


def prepare(**fields: Any) -> PreparedRequest:
    return replace(prepare_chat(**fields), formats=choose_formats(None, [], "hermes", "think"))


def write(prepared: PreparedRequest, events: list[TokenEvent], *, is_chat: bool) -> tuple[list[Any], Any]:
    """The lines of a stream, and the whole answer of the same events."""
    made = []
    for _ in range(2):
        logprobs = prepared.has_logprobs
        made.append(OllamaWriter("m", prepared.prompt_tokens, is_chat=is_chat, has_logprobs=logprobs))
    choice = Choice(prepared, 0, MODEL_INFO)
    lines = [line for event in events for line in made[0].feed(choice, choice.feed(event))]
    return [*lines, made[0].write_last(choice, TIMES)], made[1].build_answer(choice, TIMES)


def join(lines: list[Any], *, is_chat: bool) -> Any:
    """The answer that the lines of a stream make: what a client does."""
    joined: dict[str, Any] = {}
    calls: list[Any] = []
    logprobs: list[Any] = []
    for line in lines:
        message = line["message"] if is_chat else {**line, "content": line["response"]}
        for name in JOINED:
            joined[name] = joined.get(name, "") + message.get(name, "")
        calls += message.get("tool_calls", [])
        logprobs += line.get("logprobs", [])
    found = {name: text for name, text in joined.items() if text or name == "content"}
    found |= {"tool_calls": calls} if calls else {}
    last = {key: value for key, value in lines[-1].items() if key not in ("message", "response", "logprobs")}
    last |= {"logprobs": logprobs} if logprobs else {}
    if is_chat:
        return {**last, "message": {"role": "assistant", **found}}
    return {**last, "response": found.pop("content"), **found}


def split(text: str, cuts: list[int], finish: FinishReason = FinishReason.STOP) -> list[TokenEvent]:
    ids, scores = ids_of(text), logged(text)
    bounds = sorted({0, *(min(cut, len(ids)) for cut in cuts), len(ids)})
    parts = list(zip(bounds, bounds[1:], strict=False))
    events = [TokenEvent("r", ids[start:stop], scores[start:stop]) for start, stop in parts]
    return [*events, TokenEvent("r", finish=finish)]


ALL_FIELDS = prepare(tools=[TOOL], logprobs=True, top_logprobs=1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 160), max_size=6), st.booleans())
def test_a_stream_is_the_whole_answer(cuts: list[int], is_chat: bool) -> None:
    """However tokens arrive. Each call is one line, with its arguments as an object."""
    lines, whole = write(ALL_FIELDS, split(ANSWER, cuts), is_chat=is_chat)
    found = join(lines, is_chat=is_chat)
    assert found.pop("created_at") >= whole.pop("created_at")[:10]
    assert found == whole
    message = whole["message"] if is_chat else whole
    assert message["thinking"] == "hm" and (message.get("content") or whole["response"]) == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": index, "name": "add", "arguments": {"a": 1, "b": "x"}} for index in (0, 1)
    ]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_a_call_is_written_before_the_text_behind_it() -> None:
    events = split(f"{CALL} and more", list(range(120)))
    lines, _ = write(prepare(tools=[TOOL]), events, is_chat=True)
    kinds = ["calls" if "tool_calls" in line["message"] else "text" for line in lines]
    assert kinds[0] == "calls" and kinds.count("calls") == 1


def test_the_last_line_has_counts_and_nanoseconds() -> None:
    prepared = prepare()
    _, whole = write(prepared, split("Hello", []), is_chat=False)
    assert whole["done_reason"] == "stop" and whole["response"] == "Hello" and "thinking" not in whole
    assert {key: value for key, value in whole.items() if key.endswith(("duration", "count"))} == {
        "total_duration": 2_500_000_000,
        "load_duration": 0,
        "prompt_eval_count": prepared.prompt_tokens,
        "prompt_eval_duration": 500_000_000,
        "eval_count": len(ids_of("Hello")),
        "eval_duration": 1_000_000_000,
    }
    assert count_nanoseconds(0.0) == 1


@pytest.mark.parametrize(
    ("finish", "text", "reason"),
    [
        (FinishReason.LENGTH, "Hello", "length"),
        (FinishReason.STOP, "Hello", "stop"),
        (FinishReason.STOP, CALL, "stop"),
    ],
)
def test_why_an_answer_ended(finish: FinishReason, text: str, reason: str) -> None:
    lines, whole = write(prepare(tools=[TOOL]), split(text, [], finish), is_chat=True)
    assert lines[-1]["done_reason"] == whole["done_reason"] == reason


def test_logprobs_name_each_token() -> None:
    _, whole = write(prepare(logprobs=True, top_logprobs=1), split("ab", []), is_chat=True)
    assert [row["token"] for row in whole["logprobs"]] == ["a", "b"]
    assert whole["logprobs"][0].keys() == {"token", "logprob", "bytes", "top_logprobs"}


def test_a_request_without_a_prompt() -> None:
    line = OllamaWriter("m", 0, is_chat=True).write_load()
    assert line["message"] == {"role": "assistant", "content": ""}
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert OllamaWriter("m", 0, is_chat=False).write_load()["response"] == ""


def test_embeddings_have_the_length_one() -> None:
    found = build_embeddings("m", [[3.0, 4.0], [0.0, 0.0]], 7, 0.25)
    assert found["embeddings"][0] == pytest.approx([0.6, 0.8]) and found["embeddings"][1] == [0.0, 0.0]
    assert (found["prompt_eval_count"], found["total_duration"]) == (7, 250_000_000)


def test_an_error_is_a_text() -> None:
    assert build_error(Overloaded("the queue is full")) == {"error": "the queue is full"}
    assert build_error(KeyError("secret")) == {"error": "internal error (KeyError)"}


SUMMARY = ModelSummary(
    format="safetensors",
    family="qwen3",
    quantization="4bit",
    weight_bytes=4_600_000_000,
    num_parameters=8_190_735_360,
    modified=1_700_000_000.5,
    sizes={"hidden_size": 4096, "num_hidden_layers": 36},
)
MODEL = FakeModelInfo(name="org/qwen3", adapters=(LoraAdapter("sql", "0"),), summary=SUMMARY)


def make_context(model_info: FakeModelInfo, reasoning: str = "none") -> ApiContext:
    config = Config()
    formats = choose_formats(None, [], "none", reasoning)
    return ApiContext(model_info, config, MediaLoader(config.media, None), formats)


def test_names_have_a_tag() -> None:
    """An adapter's name has one already."""
    first, second = list_tags(MODEL)["models"]
    assert first["name"] == first["model"] == "org/qwen3:latest" and second["name"] == "org/qwen3:sql"
    assert first["size"] == SUMMARY.weight_bytes and first["digest"] == DIGESTS["model"]
    assert first["modified_at"] == "2023-11-14T22:13:20.500000Z"
    assert first["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": "8.2B",
        "quantization_level": "4bit",
        "context_length": 4096,
    }


def test_the_loaded_model_never_expires() -> None:
    (loaded,) = list_loaded(MODEL)["models"]
    assert loaded["name"] == "org/qwen3:latest" and loaded["size_vram"] == loaded["size"]
    assert loaded["expires_at"].startswith("9999") and loaded["context_length"] == 4096
    assert list_loaded(None) == {"models": []}


def test_what_clients_read_of_a_model() -> None:
    """Editors look for the context behind the architecture's name, or in `parameters`."""
    tuned = FakeModelInfo(summary=SUMMARY, defaults={"temperature": 0.6, "repetition_penalty": 1.05})
    found = describe_model(make_context(tuned))
    assert found["model_info"] == {
        "general.architecture": "qwen3",
        "general.parameter_count": 8_190_735_360,
        "qwen3.context_length": 4096,
        "qwen3.embedding_length": 4096,
        "qwen3.block_count": 36,
    }
    lines = [re.split(" +", line) for line in found["parameters"].splitlines()]
    assert lines == [["num_ctx", "4096"], ["temperature", "0.6"], ["repeat_penalty", "1.05"]]
    assert found["template"] == tuned.chat_template and found["modelfile"].startswith("FROM fake\n")


@pytest.mark.parametrize(
    ("model", "reasoning", "expected"),
    [
        (FakeModelInfo(), "none", ["completion", "tools"]),
        (FakeModelInfo(vision=True), "think", ["completion", "tools", "vision", "thinking"]),
        (FakeModelInfo(chat_template=None), "think", ["completion"]),
        (FakeModelInfo(pooled=PooledModel("embed", 4, 16)), "none", ["embedding"]),
        (FakeModelInfo(pooled=PooledModel("score", 1, 16)), "none", []),
        (make_infill_model(FORMATS["codellama"]), "none", ["completion", "tools", "insert"]),
    ],
)
def test_capabilities(model: FakeModelInfo, reasoning: str, expected: list[str]) -> None:
    assert list_capabilities(make_context(model, reasoning)) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (12_345, "12K"), (494_032_768, "494.03M"), (10**12, "1.0T")],
)
def test_counts_are_short(count: int, text: str) -> None:
    assert format_count(count) == text
