"""Faults put in on purpose around steps: in the prefix cache, a delivery, a template, the image processor.
Who waits is told at once, and the others live. Steps: test_server_faults.py.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.request import TokenEvent
from mlxrun.engine.client import Collector, EngineClient
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.runner import ModelRunner
from tests.helpers.engine_fakes import FakeRunner, make_engine
from tests.helpers.served_model import HELLO, make_image_messages, make_image_part
from tests.helpers.server_fakes import FakeEngine, run_server
from tests.helpers.tokenizers import FakeModelInfo
from tests.robustness.test_server_faults import LONG, ask, site, text
from tests.robustness.test_server_fuzz import nothing_left
from tests.robustness.test_server_fuzz_bodies import CHAT, HI, MESSAGES, RESPONSES
from tests.server.test_generation import engine_of
from tests.server.test_live_requests import until

pytestmark = pytest.mark.usefixtures("probed_once")


@pytest.fixture(scope="module")
def host() -> Any:
    return load_model_info(ModelSettings(), weights=True)


# -- the prefix cache -----------------------------------------------------------------------------------


async def test_copies_that_fail_are_only_missing(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while a prefix is kept: the answer is right, the next one has no hit."""
    async with site(host) as s:
        right = text(await ask(s, LONG))
        await s.engine.clear_cache()

        def failing(*_: Any) -> Any:
            raise RuntimeError("no copy")

        with monkeypatch.context() as patched:
            patched.setattr(SnapshotCodec, "copy_delta", failing)
            patched.setattr(SnapshotCodec, "copy_state", failing)
            for _ in range(2):
                reply = await ask(s, LONG)
                assert text(reply) == right
                assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert s.engine.read_stats().counts["errors"] == 0
        assert text(await ask(s, LONG)) == right
        assert (await ask(s, LONG)).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        await nothing_left(s)


@pytest.mark.parametrize("where", ["restore", "restore_keys"])
async def test_a_hit_that_cannot_be_restored_is_computed(
    host: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """An exception while a prefix is put back: the answer is right, nobody else notices."""
    async with site(host) as s:
        right = text(await ask(s, LONG))
        tried = []

        def failing(*_: Any) -> Any:
            tried.append(1)
            raise RuntimeError("no way back")

        with monkeypatch.context() as patched:
            patched.setattr(SnapshotCodec, where, failing)
            replies = await asyncio.gather(ask(s, LONG), ask(s), ask(s, LONG))
            assert [text(replies[0]), text(replies[2])] == [right, right]
        assert tried and s.engine.read_stats().counts["errors"] == 0
        assert text(await ask(s, LONG)) == right
        await nothing_left(s)


# -- a delivery -----------------------------------------------------------------------------------------


async def test_an_event_that_cannot_be_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends with an error at once and leaves the engine; events behind it arrive."""
    put = Collector.put

    def failing(self: Collector, event: TokenEvent) -> None:
        if event.tokens and event.request_id in doomed:
            raise RuntimeError("no room")
        put(self, event)

    runner, doomed = FakeRunner(), set[str]()
    client = await EngineClient.start_with(lambda: engine_of(runner))
    try:
        async with run_server(engine=client) as s:
            right = text(await ask(s, HI))
            generate = client.generate

            def marked(request: Any) -> Any:
                if request.params.max_tokens == 9:
                    doomed.add(request.id)
                return generate(request)

            monkeypatch.setattr(client, "generate", marked)
            monkeypatch.setattr(Collector, "put", failing)
            replies = await asyncio.gather(
                ask(s, HI), ask(s, HI, max_tokens=9, stream=True), ask(s, HI, max_tokens=9)
            )
            assert text(replies[0]) == right and len(doomed) == 2
            for reply in replies[1:]:
                assert reply.status == 500 and reply.json["error"]["code"] == "internal_error"
            await nothing_left(s)
            await until(lambda: not runner.rows)
            assert runner.broken == []
    finally:
        await client.close()


async def test_a_thread_that_cannot_deliver_says_so() -> None:
    """What goes wrong between the engine's thread and the loop ends the engine, and all hear of it."""
    client = await EngineClient.start_with(lambda: make_engine(FakeRunner()))
    thread = client._thread

    def failing(events: Any) -> None:
        raise RuntimeError("the loop takes nothing")

    object.__setattr__(thread._listener, "on_events", failing)
    try:
        async with run_server(engine=FakeEngine()) as s:
            s.state._loaded = replace(s.state._loaded, client=client)
            reply = await ask(s)
            assert reply.status == 503 and "the loop takes nothing" in reply.json["error"]["message"]
            assert (await s.get("/health")).status == 503
    finally:
        await client.close()


# -- what comes before the engine -----------------------------------------------------------------------


async def test_a_template_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 for the one request, whatever it is that a template raises."""
    fake = FakeModelInfo()
    apply = type(fake.tokenizer).apply_chat_template

    def failing(self: Any, messages: Any, *args: Any, **more: Any) -> Any:
        if any("boom" in str(message) for message in messages):
            raise KeyError("no such thing")
        return apply(self, messages, *args, **more)

    monkeypatch.setattr(type(fake.tokenizer), "apply_chat_template", failing)
    async with run_server(model_info=fake) as s:
        boom = [{"role": "user", "content": "boom"}]
        for path, body in (
            (CHAT, {"messages": boom}),
            (MESSAGES, {"messages": boom, "max_tokens": 4, "model": "claude-x"}),
            (RESPONSES, {"input": "boom"}),
        ):
            bad, good = await asyncio.gather(s.post(path, body), ask(s, HI))
            assert bad.status == 400 and "chat template" in json.dumps(bad.json), bad.body
            assert good.status == 200
        await nothing_left(s)


async def test_an_image_processor_that_raises(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three has an image that the processor, or the model, cannot take: 2 x 200 and one error."""
    process = type(host).process

    def failing(self: Any, given: str, images: Any) -> Any:
        if images[0].getpixel((48, 48))[2] > 200:
            raise ValueError("no blue images")
        return process(self, given, images)

    async with site(host) as s:
        right = [text(await ask(s)), text(await ask(s, make_image_messages()))]
        monkeypatch.setattr(type(host), "process", failing)
        bodies = (HELLO, make_image_messages("blue"), make_image_messages())
        one, bad, other = await asyncio.gather(*(ask(s, body) for body in bodies))
        assert [text(one), text(other)] == right
        assert bad.status == 400 and "no blue images" in bad.json["error"]["message"]
        corrupt = make_image_part()
        corrupt["image_url"]["url"] = corrupt["image_url"]["url"][:200]
        one, bad, other = await asyncio.gather(
            *(ask(s, m) for m in (HELLO, _with(corrupt), make_image_messages()))
        )
        assert [text(one), text(other)] == right
        assert bad.status == 400 and "messages[0].content[0]" in bad.json["error"]["message"]
        await nothing_left(s)


async def test_inputs_that_the_model_cannot_take(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails when a row is made, on the engine's thread, fails that request alone."""
    start = ModelRunner.start_row

    def failing(self: Any, admission: Any) -> Any:
        if admission.request.media is not None:
            raise TypeError("an odd shape")
        return start(self, admission)

    async with site(host) as s:
        right = text(await ask(s))
        monkeypatch.setattr(ModelRunner, "start_row", failing)
        one, bad, other = await asyncio.gather(ask(s), ask(s, make_image_messages()), ask(s))
        assert [text(one), text(other)] == [right, right]
        assert bad.status == 500 and bad.json["error"]["code"] == "model_error"
        assert s.engine.read_stats().counts["errors"] == 0
        await nothing_left(s)


def _with(part: Any) -> list[Any]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What colour is it?"}]}]
