"""API keys before several models: their limits hold over all of them, and they change while models serve."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mlxrun.api.anthropic.fields import COUNT_TOKENS
from mlxrun.api.ollama.fields import SHOW_PATH
from mlxrun.cluster.models.messages import BackgroundBegun, BackgroundEnded
from mlxrun.cluster.models.model_relay import COUNTED
from mlxrun.cluster.models.shared_limits import SharedLimits
from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.core.errors import RateLimited
from mlxrun.server.app import list_surfaces
from mlxrun.server.certificate import reload_config
from mlxrun.server.http.access import CONFIG, ApiKeys
from mlxrun.server.http.key_limits import KeyLimits
from mlxrun.server.live_requests import LIVE_REQUESTS
from tests.helpers.engine_fakes import Clock
from tests.helpers.fake_models import FakeModels, ModelsFront, run_models_front
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Reply, make_chat_body, make_script

CHAT = "/v1/chat/completions"
ANN, BEN = "sesame-ann-0123456789", "sesame-ben-0123456789"


def limit(**limits: int) -> dict[str, str | ApiKeySettings]:
    return {"ann": ApiKeySettings(ANN, **limits), "ben": BEN}  # type: ignore[arg-type]


async def ask(front: ModelsFront, model: str, key: str = ANN, **headers: str) -> Reply:
    return await front.post(CHAT, make_chat_body(model=model), x_api_key=key, **headers)


def check_refusal(reply: Reply, said: str) -> None:
    assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert said in reply.json["error"]["message"] and reply.headers["Retry-After"]


async def test_requests_at_once_count_over_all_models() -> None:
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script("a", gate.wait))
    async with run_models_front(models, limit=2, api_keys=limit(max_concurrent=2)) as front:
        running = [asyncio.create_task(ask(front, name)) for name in "ab"]
        await until(lambda: len(models.lives) == 2 and all(life.engine.requests for life in models.lives))
        for name in "ab":
            check_refusal(await ask(front, name), "2 requests of the API key 'ann' are running")
        other = asyncio.create_task(ask(front, "a", BEN))
        await until(lambda: sum(len(life.engine.requests) for life in models.lives) == 3)
        gate.set()
        assert [(await task).status for task in (*running, other)] == [200] * 3
        assert (await ask(front, "b")).status == 200


async def test_a_request_that_waits_for_its_model_counts() -> None:
    models = FakeModels()
    async with run_models_front(models, api_keys=limit(max_concurrent=1)) as front:
        models.held.clear()
        waiting = asyncio.create_task(ask(front, "a"))
        await until(lambda: front.pool.slots[0].waiting)
        check_refusal(await ask(front, "b"), "max_concurrent")
        models.held.set()
        assert (await waiting).status == 200


async def test_requests_and_tokens_of_a_minute_count_over_all_models() -> None:
    """Also those of a model that has been unloaded since; other paths are free."""
    for limits, said in (
        ({"requests_per_minute": 2}, "2 requests_per_minute"),
        ({"tokens_per_minute": 40}, "40 tokens_per_minute"),
    ):
        models = FakeModels(script=lambda name: make_script("abcde"))
        async with run_models_front(models, limit=1, api_keys=limit(**limits)) as front:
            assert [(await ask(front, name)).status for name in "ab"] == [200, 200]
            check_refusal(await ask(front, "a"), said)
            assert [slot.loads for slot in front.pool.slots] == [1, 1]
            assert (await ask(front, "a", BEN)).status == 200
            for path in ("/v1/models", "/v1/status"):
                assert (await front.get(path, x_api_key=ANN)).status == 200
            count = {"model": "a", "prompt": "hello"}
            assert (await front.post("/tokenize", count, x_api_key=ANN)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_in_the_background_counts_once_until_it_ends(stream: bool) -> None:
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script("a", gate.wait))
    async with run_models_front(models, limit=2, api_keys=limit(max_concurrent=2)) as front:
        body = {"model": "a", "input": "hello", "background": True, "stream": stream}
        sent = asyncio.create_task(front.post("/v1/responses", body, x_api_key=ANN))
        await until(lambda: models.lives and models.lives[0].engine.requests)
        if not stream:
            assert (await sent).status == 200
        second = asyncio.create_task(ask(front, "b"))
        await until(lambda: len(models.lives) == 2 and models.lives[1].engine.requests)
        check_refusal(await ask(front, "b"), "max_concurrent")
        gate.set()
        assert (await second).status == (await sent).status == 200
        await until(lambda: not front.app[LIVE_REQUESTS].limits._usage["ann"].running)
        both = await asyncio.gather(ask(front, "a"), ask(front, "b"))
        assert [each.status for each in both] == [200, 200]


async def test_a_response_in_the_background_ends_with_its_process() -> None:
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script("a", gate.wait) if name == "a" else None)
    async with run_models_front(models, limit=2, api_keys=limit(max_concurrent=1)) as front:
        body = {"model": "a", "input": "hello", "background": True}
        assert (await front.post("/v1/responses", body, x_api_key=ANN)).status == 200
        check_refusal(await ask(front, "b"), "max_concurrent")
        models.lives[0].record = lambda report: None  # as if it had been killed
        models.lives[0].kill()
        await until(lambda: front.pool.slots[0].state == "unloaded")
        assert (await ask(front, "b")).status == 200


async def test_the_keys_of_all_models_are_reloaded_at_once() -> None:
    """Also those of models that are loaded. Their owners keep what they have stored."""
    async with run_models_front(FakeModels(), limit=2, api_keys={"ann": ANN}) as front:
        made = await front.post("/v1/responses", {"model": "a", "input": "hello"}, x_api_key=ANN)
        config = front.app[CONFIG]
        changed = replace(config.server, api_keys={"ann": BEN, "eve": ApiKeySettings(ANN, max_concurrent=1)})
        reload_config(front.app, lambda: replace(config, server=changed))
        path = f"/v1/responses/{made.json['id']}"
        assert [(await front.get(path, x_api_key=key)).status for key in (BEN, ANN)] == [200, 404]
        assert (await ask(front, "a", "sesame-nobody")).status == 401
        assert (await ask(front, "a", BEN, x_mlxrun_key='["eve", "admin"]')).status == 200
        assert (await front.get("/v1/status", x_api_key=BEN)).status == 200


async def test_an_admin_cancels_what_others_may_not() -> None:
    gate = asyncio.Event()
    keys = {"ann": ANN, "ben": BEN, "root": ApiKeySettings("sesame-root-0123456789", "admin")}
    models = FakeModels(script=lambda name: make_script("a", gate.wait))
    async with run_models_front(models, api_keys=keys) as front:
        sent = asyncio.create_task(ask(front, "a", x_request_id="it"))
        await until(lambda: models.lives and models.lives[0].engine.requests)
        for key, status in ((BEN, 404), ("sesame-root-0123456789", 200)):
            forged = {"x_mlxrun_key": '["root", "admin"]'}
            reply = await front.post("/v1/requests/it/cancel", b"", x_api_key=key, **forged)
            assert reply.status == status
        assert (await sent).status == 499


def test_a_report_may_come_after_the_answer() -> None:
    """Then the response in the background holds a place of its own."""
    limits = KeyLimits(ApiKeys(limit(max_concurrent=1)), Clock())
    shared = SharedLimits(limits)
    with shared.follow_process() as record:
        with shared.hold("r1", "ann"):
            pass
        record(BackgroundBegun("ann", "r1", 0))
        with pytest.raises(RateLimited), shared.hold("r2", "ann"):
            pass
        record(BackgroundEnded(0))
        with shared.hold("r3", "ann"):
            record(BackgroundBegun("ann", "r3", 1))
        with pytest.raises(RateLimited), shared.hold("r4", "ann"):
            pass
    with shared.hold("r5", "ann"):
        pass


def test_each_path_counts_or_is_known_to_compute_no_answer() -> None:
    posts = {each.path for surface in list_surfaces() for each in surface.endpoints if each.method == "POST"}
    assert posts >= COUNTED
    assert {path for path in posts - COUNTED if "{" not in path} == {
        *("/v1/responses/input_tokens", COUNT_TOKENS, "/tokenize", "/detokenize", "/v1/tokenize"),
        *("/v1/detokenize", SHOW_PATH, "/v1/conversations", "/v1/cache/clear"),
        *("/v1/files", "/v1/batches", "/v1/messages/batches"),
    }
