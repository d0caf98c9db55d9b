"""Limits of API keys: requests at once, and requests and tokens in a minute."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.core.errors import RateLimited
from mlxrun.server.endpoints import openai
from mlxrun.server.endpoints.admin import WARM_PATH
from mlxrun.server.http.access import ApiKeys
from mlxrun.server.http.key_limits import KeyLimits
from mlxrun.server.telemetry import OPERATIONS
from tests.helpers.engine_fakes import Clock
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Reply, Serving, make_chat_body, make_script, run_server, server_config

CHAT = "/v1/chat/completions"
OTHER = "sesame-other-0123456789"
SECRET = "sesame-ann-0123456789"


def limit(**limits: int) -> dict[str, str | ApiKeySettings]:
    """The key `ann` with these limits, and one without any."""
    return {"ann": ApiKeySettings(SECRET, **limits), "other": OTHER}  # type: ignore[arg-type]


async def ask(s: Serving, key: str = SECRET, **fields: Any) -> Reply:
    return await s.post(CHAT, make_chat_body(**fields), x_api_key=key)


def check_refusal(reply: Reply, said: str, seconds: int) -> None:
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (429, "rate_limit_exceeded")
    assert said in error["message"] and "sesame" not in error["message"]
    assert reply.headers["Retry-After"] == str(seconds)


async def test_requests_at_once() -> None:
    """The place of a request that has ended, or whose client has gone, is free again."""
    gate = asyncio.Event()
    config = server_config(api_keys=limit(max_concurrent=2))
    async with run_server(config, script=make_script("a", gate.wait)) as s:
        running = [asyncio.create_task(ask(s)) for _ in range(2)]
        await until(lambda: len(s.live) == 2)
        check_refusal(await ask(s), "2 requests of the API key 'ann' are running (max_concurrent)", 1)
        others = [asyncio.create_task(ask(s, OTHER)) for _ in range(3)]
        await until(lambda: len(s.live) == 5)
        running.pop().cancel()
        await until(lambda: len(s.live) == 4)
        running.append(asyncio.create_task(ask(s)))
        await until(lambda: len(s.live) == 5)
        check_refusal(await ask(s), "max_concurrent", 1)
        gate.set()
        assert [(await task).status for task in (*running, *others)] == [200] * 5
        assert (await ask(s)).status == 200


async def test_a_request_counts_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its prompt is prepared, and no longer if it is refused then, or its client leaves."""
    begun, gate, prepare = list[int](), asyncio.Event(), openai.prepare_request

    async def wait(*given: Any, **more: Any) -> Any:
        begun.append(1)
        await gate.wait()
        return await prepare(*given, **more)

    monkeypatch.setattr(openai, "prepare_request", wait)
    async with run_server(server_config(api_keys=limit(max_concurrent=2))) as s:
        waiting = [asyncio.create_task(ask(s, stream=stream)) for stream in (False, True)]
        await until(lambda: len(begun) == 2)
        assert len(s.live) == 0
        check_refusal(await ask(s), "2 requests of the API key 'ann' are running (max_concurrent)", 1)
        waiting.pop().cancel()
        await until(lambda: len(s.active) == 1)
        waiting.append(asyncio.create_task(ask(s, temperature=-1)))
        await until(lambda: len(begun) == 3)
        check_refusal(await ask(s), "max_concurrent", 1)
        gate.set()
        assert [(await task).status for task in waiting] == [200, 400]
        assert (await ask(s)).status == 200


async def test_all_that_the_model_computes_counts_from_its_arrival() -> None:
    async with run_server(server_config(api_keys=limit(max_concurrent=1))) as s:
        with s.live.limits.accept("r", "ann"):
            found = {
                path: (await s.post(path, {}, x_api_key=SECRET)).status for path in {*OPERATIONS, WARM_PATH}
            }
            assert found == dict.fromkeys(found, 429)
            assert (await s.post("/tokenize", {"prompt": "hi"}, x_api_key=SECRET)).status == 200


async def test_requests_in_a_minute() -> None:
    """Three at once, and then one every twenty seconds. A refused one does not count."""
    clock = Clock()
    config = server_config(api_keys=limit(requests_per_minute=3))
    async with run_server(config, clock=clock) as s:
        assert [(await ask(s)).status for _ in range(3)] == [200] * 3
        for _ in range(2):
            check_refusal(await ask(s), "has used its 3 requests_per_minute: try again in 20 s", 20)
        clock.now += 19
        check_refusal(await ask(s), "try again in 1 s", 1)
        assert (await ask(s, OTHER)).status == 200
        clock.now += 1
        assert [(await ask(s)).status for _ in range(2)] == [200, 429]
        clock.now += 1000
        assert [(await ask(s)).status for _ in range(4)] == [200, 200, 200, 429]
        assert (await s.get("/v1/models", x_api_key=SECRET)).status == 200, "it needs no tokens"


async def test_requests_that_only_count_tokens_are_exempt() -> None:
    """As docs/server.md says."""
    messages = [{"role": "user", "content": "hi"}]
    exempt: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1]},
        "/v1/messages/count_tokens": {"model": "m", "messages": messages},
        "/v1/responses/input_tokens": {"input": "hi"},
    }
    async with run_server(server_config(api_keys=limit(requests_per_minute=1))) as s:
        assert [(await ask(s)).status for _ in range(2)] == [200, 429]
        for path, body in exempt.items():
            assert (await s.post(path, body, x_api_key=SECRET)).status == 200, path


async def test_tokens_in_a_minute() -> None:
    """20 of the prompt and 5 of the answer: the second request exceeds 40, and is paid off then."""
    clock = Clock()
    config = server_config(api_keys=limit(tokens_per_minute=40))
    async with run_server(config, script=make_script("abcde"), clock=clock) as s:
        assert [(await ask(s)).status for _ in range(2)] == [200, 200]
        check_refusal(await ask(s), "has used its 40 tokens_per_minute: try again in 15 s", 15)
        clock.now += 15
        assert [(await ask(s)).status for _ in range(2)] == [200, 429]
        assert (await ask(s, stream=True)).status == 429
        assert (await ask(s, OTHER)).status == 200


async def test_responses_in_the_background_count() -> None:
    clock = Clock()
    config = server_config(api_keys=limit(max_concurrent=1, tokens_per_minute=10))
    gate = asyncio.Event()
    async with run_server(config, script=make_script("a", gate.wait), clock=clock) as s:
        body = {"input": "hello", "background": True}
        assert (await s.post("/v1/responses", body, x_api_key=SECRET)).status == 200
        check_refusal(await ask(s), "max_concurrent", 1)
        check_refusal(await s.post("/v1/responses", body, x_api_key=SECRET), "max_concurrent", 1)
        gate.set()
        await s.settle()
        check_refusal(await ask(s), "tokens_per_minute", 66)


def test_limits_that_change() -> None:
    """What was used without a limit is not paid off later, and a key that is gone has none."""
    clock = Clock()
    keys = ApiKeys(limit())
    limits = KeyLimits(keys, clock)
    with limits.hold("ann"):
        limits.count_tokens("ann", 10**9)
    keys.replace(limit(tokens_per_minute=10))
    with limits.hold("ann"):
        limits.count_tokens("ann", 20)
    with pytest.raises(RateLimited), limits.hold("ann"):
        pass
    keys.replace(limit(tokens_per_minute=20))
    with limits.hold("ann"):
        keys.replace({})
    with limits.hold("ann"), limits.hold(""):
        limits.count_tokens("ann", 1)
        limits.count_tokens("", 1)
