"""Lines of /v1/responses and /v1/messages: the answer of a line is that of the endpoint for the same body,
also if it is continued in the middle; what only a server has is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.choice import Choice
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.config.settings import Config
from mlxrun.core.errors import Overloaded, RequestError
from mlxrun.core.request import HitKind, Request, TokenEvent
from mlxrun.jobs.lines.job_file import CHAT, COMPLETION, MESSAGE, RESPONSE, JobLine
from mlxrun.jobs.records.output_records import BatchStamp, LineTokens
from mlxrun.jobs.run import line_answerer
from mlxrun.jobs.run.line_answerer import LineAnswerer, LinePreparer
from mlxrun.jobs.run.partial_answers import PartialAnswer, PartialAnswers, digest_request
from mlxrun.jobs.run.progress import ProgressMeter
from tests.helpers.anthropic_api import ADD, IMAGE, TOOL_MODEL_INFO, body, user
from tests.helpers.responses_api import ADD as ADD_FUNCTION
from tests.helpers.responses_api import PNG
from tests.helpers.server_fakes import Act, FakeEngine, run_server, tokens_of
from tests.helpers.tokenizers import FakeModelInfo

FORMATS = choose_formats(None, [], "hermes", "think")
REASONED = ("<think>", "hm", ", 1", "</think>", "\n\n")
CALL = ("<tool_call>", '{"name": "add", "arguments": {"a": 1, ', '"b": "x"}}', "</tool_call>")
EYES = FakeModelInfo(vision=True)
TEXT = FakeModelInfo()
FREE = {"type": "custom", "name": "add"}
FREE_CALL = ("<tool_call>", '{"name": "add", "arguments": {"input": "1 ', '+ 2"}}', "</tool_call>")
SEE = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": PNG}]}

# URL, body, what the engine says, and the model.
CASES: dict[str, tuple[str, Any, tuple[str, ...], FakeModelInfo]] = {
    "message": (MESSAGE, body(max_tokens=99), ("Hello", " wörld", "!"), TEXT),
    "message of reasoning": (MESSAGE, body(max_tokens=99), (*REASONED, "Three", "."), TEXT),
    "message with a call": (
        MESSAGE,
        body(max_tokens=200, tools=[ADD]),
        (*REASONED, "So:\n", *CALL),
        TOOL_MODEL_INFO,
    ),
    "message about an image": (MESSAGE, body(user(IMAGE), max_tokens=9), ("red",), EYES),
    "message with a stop": (MESSAGE, body(max_tokens=99, stop_sequences=["thr"]), ("one two three",), TEXT),
    "message that is cut": (MESSAGE, body(max_tokens=4), ("one two three",), TEXT),
    "message of the context's length": (MESSAGE, body(max_tokens=10**6), ("x" * 9,), TEXT),
    "response": (RESPONSE, {"input": "hi", "metadata": {"a": "b"}}, ("Hello", " wörld", "!"), TEXT),
    "response of reasoning": (
        RESPONSE,
        {"input": "hi", "include": ["reasoning.encrypted_content"]},
        (*REASONED, "Three", "."),
        TEXT,
    ),
    "response with a call": (
        RESPONSE,
        {"input": "hi", "tools": [ADD_FUNCTION]},
        (*REASONED, "So:\n", *CALL),
        TOOL_MODEL_INFO,
    ),
    "response with a free call": (RESPONSE, {"input": "hi", "tools": [FREE]}, FREE_CALL, TOOL_MODEL_INFO),
    "response about an image": (RESPONSE, {"input": [SEE]}, ("red",), EYES),
    "response with logprobs": (
        RESPONSE,
        {
            "input": "hi",
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "tools": [ADD_FUNCTION],
        },
        ("<think>", "a so it", "</think>", "so it", *CALL),
        TOOL_MODEL_INFO,
    ),
    "response that is cut": (RESPONSE, {"input": "hi", "max_output_tokens": 4}, ("one two three",), TEXT),
    "scored prompts": (
        COMPLETION,
        {"prompt": ["one two", "three"], "echo": True, "logprobs": 1, "max_tokens": 0},
        ("not said",),
        TEXT,
    ),
    "scored chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 2, "max_tokens": 3},
        ("Hello", " world"),
        TEXT,
    ),
    "scored prompt and answer": (
        COMPLETION,
        {"prompt": [104, 105], "echo": True, "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 9},
        ("so", " it is"),
        TEXT,
    ),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 2}, ("Hello",), TEXT),
}


class Script:
    """What an engine says, from the tokens that a request has already; it breaks off after `most` more."""

    def __init__(self, *texts: str, most: int = 10**6, left_out: int = 0) -> None:
        self._texts = texts
        self._most = most
        self._left_out = left_out  # tokens of the prompt
        self.known: list[int] = []  # tokens that each request had

    def __call__(self, request: Request) -> Iterator[Act]:
        self.known.append(len(request.prior_output))
        hit = TokenEvent("", num_cached_tokens=3, num_computed_tokens=3, hit_kind=HitKind.PREFIX)
        yield hit._replace(num_left_out=self._left_out)
        events = [event for text in self._texts for event in tokens_of(text, request)]
        yield from events[len(request.prior_output) :][: self._most]
        if self._most < len(events) - len(request.prior_output):
            yield Overloaded("in the middle of it")


class LineBench:
    """Answers one line, with the partial answers of earlier tries."""

    def __init__(self, folder: Path, url: str, given: Any, model_info: FakeModelInfo) -> None:
        self.line = JobLine(1, "a", url, given)
        self._model_info = model_info
        self._preparer = LinePreparer(model_info, Config(), folder, formats=FORMATS, max_tokens=None)
        self._answers = PartialAnswers(folder / "answers.jsonl")

    async def answer(self, script: Script) -> dict[str, Any]:
        engine: Any = FakeEngine(self._model_info, script)
        meter = ProgressMeter(lambda: 0.0)
        answerer = LineAnswerer(engine, self._preparer, Config(), meter, self._answers)
        return await answerer.answer(self.line, "0123456789abcdef" * 2, LineTokens())


@pytest.mark.parametrize(
    ("name", "times"), [("response", {"created_at": 99, "completed_at": 99}), ("message", {})]
)
async def test_the_stamp_of_a_batch(name: str, times: dict[str, int], tmp_path: Path) -> None:
    """Times are the batch's and cached tokens are counted; a command has neither. Ids are made of the key."""
    url, given, texts, model_info = CASES[name]
    (tmp_path / "batch").mkdir()
    plain, stamped = (
        LineBench(tmp_path, url, given, model_info),
        LineBench(tmp_path / "batch", url, given, model_info),
    )
    stamped._preparer = stamped._preparer.for_batch(BatchStamp("batch_1", 99), None)
    command, batch = await plain.answer(Script(*texts)), await stamped.answer(Script(*texts))
    assert {key: batch[key] for key in times} == times
    assert {key: command[key] for key in times} == dict.fromkeys(times, 0)
    cached = [
        usage.get("cache_read_input_tokens", usage.get("input_tokens_details", {}).get("cached_tokens"))
        for usage in (command["usage"], batch["usage"])
    ]
    assert cached == [0, 3]
    assert command["id"] == batch["id"]


@pytest.mark.parametrize(
    ("name", "place"),
    [("response", "input_tokens_details"), ("message", None), ("chat", "prompt_tokens_details")],
)
async def test_tokens_that_were_left_out_are_told(name: str, place: str | None, tmp_path: Path) -> None:
    """Every API's answer says that its prompt was computed sparsely, and no other one does."""
    url, given, texts, model_info = CASES[name]
    for left_out in (0, 7):
        folder = tmp_path / str(left_out)
        folder.mkdir()
        body = await LineBench(folder, url, given, model_info).answer(Script(*texts, left_out=left_out))
        usage = body["usage"] if place is None else body["usage"].get(place, {})
        assert usage.get("left_out_tokens", 0) == left_out


def normalize(value: Any) -> Any:
    """A body without what depends on the moment: ids, times, the seed, and what the cache had."""
    if isinstance(value, list):
        return [normalize(each) for each in value]
    if not isinstance(value, dict):
        return value
    changing = ("seed", "system_fingerprint", "prompt_tokens_details", "input_tokens_details", "store")
    found = {key: normalize(each) for key, each in value.items() if key not in changing}
    for key in ("id", "call_id"):
        if isinstance(found.get(key), str):
            found[key] = re.split("[_-]", found[key])[0]
    for key in ("created", "created_at", "completed_at"):
        if found.get(key) is not None:
            found[key] = 0
    if "cache_read_input_tokens" in found:
        found["input_tokens"] += found.pop("cache_read_input_tokens")
    return found


async def answer_by_http(url: str, given: Any, texts: Sequence[str], model_info: FakeModelInfo) -> Any:
    async with run_server(script=Script(*texts), model_info=model_info, formats=FORMATS) as server:
        reply = await server.post(url, given)
        assert reply.status == 200, reply.body
        return reply.json


@pytest.mark.parametrize("name", CASES)
async def test_a_line_is_answered_as_the_endpoint_answers(name: str, tmp_path: Path) -> None:
    url, given, texts, model_info = CASES[name]
    expected = normalize(await answer_by_http(url, given, texts, model_info))
    found = await LineBench(tmp_path, url, given, model_info).answer(Script(*texts))
    assert normalize(found) == expected


async def answer_in_parts(name: str, folder: Path, most: int) -> tuple[dict[str, Any], list[int]]:
    """The answer of a line whose engine breaks off after every `most` tokens, and what each try had of it."""
    url, given, texts, model_info = CASES[name]
    bench, script = LineBench(folder, url, given, model_info), Script(*texts, most=most)
    for _ in range(200):
        try:
            return await bench.answer(script), script.known
        except Overloaded:
            continue
    raise AssertionError("it never ended")


@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] in ("message", "response")])
async def test_continued_in_the_middle(name: str, tmp_path: Path) -> None:
    """However often it breaks off: the same bytes as in one go."""
    url, given, texts, model_info = CASES[name]
    (tmp_path / "whole").mkdir()
    whole = await LineBench(tmp_path / "whole", url, given, model_info).answer(Script(*texts))
    for most in (1, 2, 7):
        (tmp_path / f"{most}").mkdir()
        found, known = await answer_in_parts(name, tmp_path / f"{most}", most)
        assert found == whole
        assert known == sorted(known) and (len(known) == 1 or known[-1] > 0)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("scored")])
async def test_lines_with_scored_prompts_begin_anew(name: str, tmp_path: Path) -> None:
    """After a try that broke off, and after one that ended before its record was written: the prompt's
    logprobs are not kept, so nothing is continued, and the bytes are those of one go."""
    url, given, texts, model_info = CASES[name]
    (tmp_path / "whole").mkdir()
    whole = await LineBench(tmp_path / "whole", url, given, model_info).answer(Script(*texts))
    bench = LineBench(tmp_path, url, given, model_info)
    if given["max_tokens"] > 0:
        with pytest.raises(Overloaded):
            await bench.answer(Script(*texts, most=2))
    for _ in range(2):
        script = Script(*texts)
        assert await bench.answer(script) == whole
        assert set(script.known) == {0}


async def test_a_scored_line_that_is_continued_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: an answer that is taken from an earlier try has no logprobs of its prompt."""
    monkeypatch.setattr(PartialAnswers, "find", find_kept)
    url, given, texts, model_info = CASES["scored prompts"]
    bench = LineBench(tmp_path, url, given, model_info)
    await bench.answer(Script(*texts))
    with pytest.raises(RequestError, match="incomplete"):
        await bench.answer(Script(*texts))


def find_kept(self: PartialAnswers, key: str, choice: int, request: Request) -> PartialAnswer:
    new = PartialAnswer(digest_request(request))
    return self._lines.setdefault(key, {}).setdefault(choice, new)


async def test_a_continuation_that_is_not_written_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: the tokens of the earlier try reach the choice and not the body."""
    resume = Choice.resume
    monkeypatch.setattr(Choice, "resume", lambda self, *given: resume(self, *given) and [])
    url, given, texts, model_info = CASES["response with a call"]
    (tmp_path / "whole").mkdir()
    whole = await LineBench(tmp_path / "whole", url, given, model_info).answer(Script(*texts))
    found, _ = await answer_in_parts("response with a call", tmp_path, 7)
    assert found != whole


async def test_merged_events_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come together are written one by one: else logprobs could go to other parts."""
    url, given, texts, model_info = CASES["response with logprobs"]
    (tmp_path / "single").mkdir()
    single = await LineBench(tmp_path / "single", url, given, model_info).answer(Script(*texts))

    class Merging(Script):
        def __call__(self, request: Request) -> Iterator[Act]:
            events = [event for event in super().__call__(request) if isinstance(event, TokenEvent)]
            tokens = tuple(token for event in events for token in event.tokens)
            logprobs = tuple(each for event in events for each in event.logprobs)
            yield events[-1]._replace(tokens=tokens, logprobs=logprobs)

    assert await LineBench(tmp_path, url, given, model_info).answer(Merging(*texts)) == single
    logprobs = single["output"][1]["content"][0]["logprobs"]
    assert "".join(each["token"] for each in logprobs) == "so it"
    event = TokenEvent("r", (1, 2), num_computed_tokens=9)
    assert [each.tokens for each in line_answerer.split_event(event)] == [(1,), (2,)]


@pytest.mark.parametrize(
    ("url", "given", "param"),
    [
        (RESPONSE, {"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSE, {"input": "hi", "conversation": "conv_1"}, "conversation"),
        (RESPONSE, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        (RESPONSE, {"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        (MESSAGE, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
        (MESSAGE, body([{"role": "user", "content": [{"type": "text"}]}]), "messages.0.content.0.text"),
        (
            MESSAGE,
            body(user({"type": "image", "source": {"type": "file", "file_id": "file_1"}})),
            "messages.0.content.0.source.type",
        ),
    ],
)
async def test_refused_by_name(url: str, given: Any, param: str, tmp_path: Path) -> None:
    """As the endpoint refuses it; what only a server stores too, since a job has no store."""
    with pytest.raises(RequestError) as caught:
        await LineBench(tmp_path, url, given, EYES).answer(Script("x"))
    assert caught.value.param == param


@pytest.mark.parametrize("more", [{}, {"store": True}, {"background": True}, {"store": False}])
async def test_an_answer_of_a_job_is_not_stored(more: dict[str, Any], tmp_path: Path) -> None:
    """`store` and `background` are about the server alone; the answer says that it is not stored."""
    found = await LineBench(tmp_path, RESPONSE, {"input": "hi", **more}, TEXT).answer(Script("Hello"))
    assert (found["store"], found["background"], found["status"]) == (False, False, "completed")
    assert found["created_at"] == found["completed_at"] == 0
    assert found["output"][0]["content"][0]["text"] == "Hello"
