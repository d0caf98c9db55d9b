"""Responses in the background go on without their client, and can be polled, followed and cancelled."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any
from urllib.parse import urlsplit

import pytest

from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.core.request import Request
from mlxrun.core.visible_text import FIELDS
from mlxrun.server.endpoints import responses
from mlxrun.server.lifecycle import drain
from mlxrun.server.responses.response_runs import RESPONSES
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Reply, Serving, make_script, parse_events, run_server, server_config

URL = "/v1/responses"
BODY = {"input": "hi", "background": True}


async def start(s: Serving, **fields: Any) -> dict[str, Any]:
    reply = await s.post(URL, {**BODY, **fields})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


async def poll(s: Serving, name: str) -> dict[str, Any]:
    """The response once it has ended."""
    for _ in range(30_000):
        found: dict[str, Any] = (await s.get(f"{URL}/{name}")).json
        if found["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.002)
    raise AssertionError(f"{name} does not end")


def list_events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each under the name of its type."""
    assert reply.status == 200, reply.body
    events = reply.events
    assert events.pop() == (None, "[DONE]")
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


async def test_a_response_is_queued_and_polled() -> None:
    wait, go = asyncio.Event(), asyncio.Event()
    async with run_server(script=make_script(wait.wait, "Hel", go.wait, "lo")) as s:
        made = await start(s, metadata={"a": "b"})
        assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
        path = f"{URL}/{made['id']}"
        assert (await s.get(path)).json == made
        assert (await s.get(f"{path}/input_items")).json["data"][0]["content"][0]["text"] == "hi"
        assert [live.id for live in s.live] == [made["id"]], "it is listed by its own id"
        wait.set()
        while (await s.get(path)).json["status"] == "queued":
            await asyncio.sleep(0.002)
        assert (await s.get(path)).json["status"] == "in_progress"
        assert (await s.request("DELETE", path)).status == 400
        early = await s.post(URL, {"input": "and?", "previous_response_id": made["id"]})
        assert early.status == 400 and "still running" in early.json["error"]["message"]
        go.set()
        done = await poll(s, made["id"])
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")
        assert done["usage"]["output_tokens"] == 5 and done["metadata"] == {"a": "b"}
        await s.settle()
        assert not s.app[RESPONSES].tasks and not s.app[RESPONSES].running
        after = await s.post(URL, {"input": "and?", "previous_response_id": made["id"]})
        assert after.status == 200
        assert (await s.request("DELETE", path)).json["deleted"] is True


async def test_its_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its HTTP request ended long before."""
    caplog.set_level(logging.INFO, "mlxrun.server.endpoints.responses")
    async with run_server(server_config(api_keys={"ann": "sk-ann"}), script=make_script("Hello")) as s:
        s.headers["x-api-key"] = "sk-ann"
        name = (await start(s))["id"]
        await poll(s, name)
        await s.settle()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name} background response completed ")
    fields = vars(record)[FIELDS]
    assert (fields["request_id"], fields["key"], fields["response_status"]) == (name, "ann", "completed")
    assert (fields["output_tokens"], fields["tokens_per_second"]) != (0, None)


async def test_its_answer_is_that_of_a_request_that_stays_open() -> None:
    async with run_server() as s:
        background = await poll(s, (await start(s, seed=3))["id"])
        plain = (await s.post(URL, {"input": "hi", "seed": 3})).json
        for each in (background, plain):
            del (
                each["id"],
                each["background"],
                each["created_at"],
                each["completed_at"],
                each["output"][0]["id"],
            )
        assert background == plain


async def test_a_client_that_vanishes_ends_nothing() -> None:
    """Neither the one that asked, nor one that follows."""
    go = asyncio.Event()
    async with run_server(script=make_script("Hel", go.wait, "lo")) as s:
        asking = asyncio.create_task(s.post(URL, {**BODY, "stream": True}))
        await until(lambda: s.app[RESPONSES].running)
        name = next(iter(s.app[RESPONSES].running))
        following = asyncio.create_task(s.get(f"{URL}/{name}?stream=true"))
        await asyncio.sleep(0.05)
        for each in (asking, following):
            each.cancel()
        await asyncio.gather(asking, following, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert (await s.get(f"{URL}/{name}")).json["status"] == "in_progress" and not s.engine.aborted
        go.set()
        assert (await poll(s, name))["output"][0]["content"][0]["text"] == "Hello"
        await s.settle()


async def test_a_client_that_vanishes_at_once_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it was told the response's id."""
    monkeypatch.setattr(responses, "START_SECONDS", 60.0)
    go = asyncio.Event()
    async with run_server(script=make_script(go.wait, "lo")) as s:
        asking = asyncio.create_task(s.post(URL, BODY))
        await until(lambda: s.engine.requests)
        name = next(iter(s.app[RESPONSES].running))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.02)
        go.set()
        assert (await poll(s, name))["status"] == "completed"


async def test_events_can_be_followed_from_any_number() -> None:
    """While it runs and afterwards, by several; the events are the same."""
    go = asyncio.Event()
    async with run_server(script=make_script("Hel", go.wait, "lo")) as s:
        async with s.http.post(s.url + URL, json={**BODY, "stream": True}) as response:
            text = b""
            while b"output_text.delta" not in text:
                text += await response.content.readuntil(b"\n\n")
            created = parse_events(text.decode())[0][1]["response"]
            path = f"{URL}/{created['id']}?stream=true"
            followers = [asyncio.create_task(s.get(f"{path}&starting_after={n}")) for n in (0, 3)]
            await asyncio.sleep(0.02)
            go.set()
            text += await response.read()
        events = list_events(Reply(200, {}, text))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
        assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [list_events(await follower) for follower in followers] == [events[1:], events[4:]]
        await s.settle()
        assert list_events(await s.get(path)) == events
        assert list_events(await s.get(f"{path}&starting_after=5&include_obfuscation=false")) == events[6:]
        assert list_events(await s.get(f"{path}&starting_after={len(events)}")) == []
        assert (await s.get(path.partition("?")[0])).json == events[-1]["response"]
        for query in ("starting_after=1", "stream=true&starting_after=x", "stream=maybe"):
            assert (await s.get(f"{path.partition('?')[0]}?{query}")).status == 400


async def test_head_of_a_stream_has_no_events() -> None:
    """Nor does it wait for the response. The connection stays usable."""
    go = asyncio.Event()
    async with run_server(script=make_script(go.wait, "Hello")) as s:
        path = f"{URL}/{(await start(s))['id']}?stream=true"
        for _ in range(2):  # while it runs, and afterwards
            at = urlsplit(s.url)
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            host = f"Host: {at.netloc}\r\n"
            writer.write(f"HEAD {path} HTTP/1.1\r\n{host}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head and b"text/event-stream" in head
            writer.write(f"GET /health HTTP/1.1\r\n{host}Connection: close\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            go.set()
            await s.settle()


async def test_its_id_is_no_id_of_another_request() -> None:
    """While it runs, a request with its id gets another one."""
    go = asyncio.Event()
    async with run_server(script=make_script(go.wait, "Hello")) as s:
        name = (await start(s))["id"]
        task = asyncio.create_task(s.post(URL, {"input": "hi"}, x_request_id=name))
        await asyncio.sleep(0.02)
        go.set()
        reply = await task
        assert reply.status == 200 and reply.headers["x-request-id"] != name
        await poll(s, name)
        await s.settle()
        assert not s.active


async def test_cancelling_keeps_what_there_is() -> None:
    never = asyncio.Event()
    async with run_server(script=make_script("half", never.wait)) as s:
        made = await start(s)
        path = f"{URL}/{made['id']}"
        following = asyncio.create_task(s.get(f"{path}?stream=true"))
        while (await s.get(path)).json["status"] == "queued":
            await asyncio.sleep(0.002)
        cancelled = (await s.post(f"{path}/cancel", {})).json
        assert cancelled["status"] == "cancelled" and cancelled["output"][0]["status"] == "incomplete"
        assert list_events(await following)[-1]["response"] == cancelled
        assert (await s.get(path)).json == cancelled == (await s.post(f"{path}/cancel", {})).json
        await s.settle()
        assert len(s.engine.aborted) == 1


async def test_one_that_waits_can_be_cancelled() -> None:
    never = asyncio.Event()
    async with run_server(script=make_script(never.wait)) as s:
        made = await start(s)
        assert (await s.post(f"{URL}/{made['id']}/cancel", {})).json["status"] == "cancelled"
        other = await start(s)
        assert (await s.post(f"/v1/requests/{other['id']}/cancel", {})).status == 200
        assert (await poll(s, other["id"]))["status"] == "cancelled"
        await s.settle()


async def test_an_incomplete_response_says_why() -> None:
    async with run_server(script=make_script("abc")) as s:
        done = await poll(s, (await start(s, max_output_tokens=2))["id"])
        assert (done["status"], done["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_an_error_at_once_is_that_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a client that is told to retry does; nothing is stored."""
    monkeypatch.setattr(responses, "START_SECONDS", 60.0)
    for error, status in ((Overloaded("full"), 429), (EngineDead("dead"), 503)):
        async with run_server(script=make_script(error)) as s:
            for streaming in (False, True):
                reply = await s.post(URL, {**BODY, "stream": streaming})
                assert (reply.status, reply.json["error"]["message"]) == (status, str(error))
            await s.settle()
            state = s.app[RESPONSES]
            assert not state.running and not state.tasks and len(state.store) == 0


async def test_a_later_error_is_that_of_the_response() -> None:
    go = asyncio.Event()
    async with run_server(script=make_script("half", go.wait, EngineDead("dead"))) as s:
        made = await start(s)
        go.set()
        failed = await poll(s, made["id"])
        assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "dead"})
        assert list_events(await s.get(f"{URL}/{made['id']}?stream=true"))[-1]["type"] == "response.failed"


async def test_a_bug_fails_the_response(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits forever for it."""
    go = asyncio.Event()

    def explode(*_: Any) -> list[Any]:
        raise ZeroDivisionError

    async with run_server(script=make_script("a", go.wait, "b")) as s:
        made = await start(s)
        monkeypatch.setattr("mlxrun.api.responses.stream.ResponseWriter.feed", explode)
        go.set()
        assert (await poll(s, made["id"]))["status"] == "failed"
        assert "ZeroDivisionError" in caplog.text
        await s.settle()


async def test_the_stop_of_the_server_ends_it() -> None:
    """It may finish until the time limit, then it fails, and those who follow it are told."""
    never, go = asyncio.Event(), asyncio.Event()
    async with run_server(server_config(drain_timeout=60.0), script=make_script(go.wait, "lo")) as s:
        made = await start(s)
        stopping = asyncio.create_task(drain(s.app))
        await asyncio.sleep(0.02)
        assert not stopping.done() and (await s.post(URL, BODY)).status == 503
        go.set()
        await stopping
        assert (await poll(s, made["id"]))["status"] == "completed"
    async with run_server(server_config(drain_timeout=0.05), script=make_script("a", never.wait)) as s:
        made = await start(s)
        async with s.http.get(f"{s.url}{URL}/{made['id']}?stream=true") as following:
            await drain(s.app)
            last = list_events(Reply(following.status, {}, await following.read()))[-1]
        assert last["type"] == "response.failed" and "shutting down" in last["response"]["error"]["message"]
        assert (await poll(s, made["id"]))["status"] == "failed"


async def test_the_end_of_the_application_leaves_no_task() -> None:
    never = asyncio.Event()
    async with run_server(script=make_script("a", never.wait)) as s:
        await start(s)
        tasks = tuple(s.app[RESPONSES].tasks)
        assert len(tasks) == 1
    assert all(task.done() for task in tasks) and not s.app[RESPONSES].running


async def test_it_needs_a_store() -> None:
    async with run_server(server_config(store_responses=0)) as s:
        reply = await s.post(URL, BODY)
        assert (reply.status, reply.json["error"]["param"]) == (400, "background")
        assert not s.engine.requests
    async with run_server() as s:
        assert (await s.post(URL, {**BODY, "store": False})).json["error"]["param"] == "background"


async def test_what_is_too_large_to_store_says_so() -> None:
    async with run_server(server_config(store_bytes=6000), script=make_script("x" * 300)) as s:
        failed = await poll(s, (await start(s))["id"])
        assert failed["status"] == "failed" and "server.store_bytes" in failed["error"]["message"]
        (last,) = list_events(await s.get(f"{URL}/{failed['id']}?stream=true&starting_after=4"))
        assert (last["type"], last["sequence_number"]) == ("response.failed", 5)
        assert last["response"] == failed


async def test_it_belongs_to_its_conversation() -> None:
    go = asyncio.Event()
    async with run_server(script=make_script(go.wait, "Bob")) as s:
        name = (await s.post("/v1/conversations", {})).json["id"]
        made = await start(s, conversation=name)
        locked = await s.post(URL, {"input": "x", "conversation": name})
        assert locked.json["error"]["code"] == "conversation_locked"
        go.set()
        await poll(s, made["id"])
        items = (await s.get(f"/v1/conversations/{name}/items?order=asc")).json["data"]
        assert [item["content"][0]["text"] for item in items] == ["hi", "Bob"]
        assert (await s.post(URL, {"input": "x", "conversation": name})).status == 200


async def test_another_key_does_not_see_it() -> None:
    never = asyncio.Event()
    config = server_config(api_keys={"ann": "sk-ann", "ben": "sk-ben"})
    async with run_server(config, script=make_script("a", never.wait)) as s:
        name = (await s.post(URL, BODY, x_api_key="sk-ann")).json["id"]
        for method, where in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
            assert (await s.request(method, f"{URL}/{name}{where}", x_api_key="sk-ben")).status == 404
        assert (await s.post(f"{URL}/{name}/cancel", {}, x_api_key="sk-ann")).status == 200


@pytest.mark.parametrize("round_", range(3))
async def test_many_clients_at_random(round_: int) -> None:
    """Some poll, follow or cancel, most vanish; every response ends once, and nothing is left."""
    rng = random.Random(round_)

    def script(request: Request) -> Any:
        for _ in range(rng.randrange(1, 9)):
            yield "ab"
            yield lambda: asyncio.sleep(rng.random() * 0.003)
        if rng.random() < 0.2:
            yield EngineDead("by chance")

    async def use(s: Serving) -> str | None:
        reply = await s.post(URL, {**BODY, "stream": rng.random() < 0.3})
        if reply.status != 200:
            return None
        first = reply.events[0][1] if reply.events else reply.json
        name: str = first.get("response", first)["id"]
        for _ in range(rng.randrange(4)):
            what = rng.choice(("", "?stream=true", "?stream=true&starting_after=3", "/cancel"))
            method = "POST" if what == "/cancel" else "GET"
            asking = asyncio.create_task(
                s.request(method, f"{URL}/{name}{what}", b"{}" if what == "/cancel" else None)
            )
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.005)
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return name

    async with run_server(script=script) as s:
        tasks = [asyncio.create_task(use(s)) for _ in range(40)]
        await asyncio.sleep(0.02)
        for task in rng.sample(tasks, 10):
            task.cancel()
        names = await asyncio.gather(*tasks, return_exceptions=True)
        await s.settle()
        state = s.app[RESPONSES]
        assert not state.running and not s.engine.running
        assert all(task.done() for task in state.tasks)
        for name in (each for each in names if isinstance(each, str)):
            found = (await s.get(f"{URL}/{name}")).json
            assert found["status"] in ("completed", "failed", "cancelled")
            events = list_events(await s.get(f"{URL}/{name}?stream=true"))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["response"] == found
