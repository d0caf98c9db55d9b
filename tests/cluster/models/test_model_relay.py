"""The front of several models before scripted engines that really listen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.api.ollama.request import read_keep_alive
from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.core.errors import RequestError
from mlxrun.server.engine_state import ENGINE
from tests.api.test_prompt_prefix import BODIES
from tests.helpers.fake_models import FakeModel, FakeModels, ModelsFront, run_models_front
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Reply, Script, make_chat_body, make_script


def say_name(name: str) -> Script:
    return make_script(f"I am {name}")


def read_text(reply: Any) -> str:
    assert reply.status == 200, reply.body
    found: str = reply.json["choices"][0]["message"]["content"]
    return found


async def test_each_request_reaches_the_model_that_it_names() -> None:
    """On every surface, by every name; without one, the first model of the config."""
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        for name, said in (("a", "a"), ("b", "b"), ("b-alias", "b"), ("a-more", "a")):
            reply = await front.post("/v1/chat/completions", make_chat_body(model=name))
            assert read_text(reply) == f"I am {said}" and reply.json["model"] == said
        messages = make_chat_body()["messages"]
        claude = {"model": "b", "max_tokens": 9, "messages": messages}
        reply = await front.post("/v1/messages", claude, anthropic_version="2023-06-01")
        assert reply.json["content"][0]["text"] == "I am b"
        reply = await front.post("/v1/responses", {"model": "b", "input": "hello"})
        assert reply.json["output"][0]["content"][0]["text"] == "I am b"
        chat = {"model": "b:latest", "messages": messages, "stream": False}
        assert (await front.post("/api/chat", chat)).json["message"]["content"] == "I am b"
        for body in (make_chat_body(), make_chat_body(model="")):
            assert read_text(await front.post("/v1/chat/completions", body)) == "I am a"


async def test_a_body_with_a_mark_before_it_reaches_its_model() -> None:
    """Some programs begin each file with a byte order mark."""
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        body = b"\xef\xbb\xbf" + json.dumps(make_chat_body(model="b")).encode()
        assert read_text(await front.post("/v1/chat/completions", body)) == "I am b"
        assert [slot.state for slot in front.pool.slots] == ["unloaded", "ready"]


async def test_half_an_emoji_beside_a_stored_file_is_refused(tmp_path: Path) -> None:
    async with run_models_front(FakeModels(script=say_name), data=tmp_path) as front:
        upload = aiohttp.FormData({"purpose": "user_data"})
        upload.add_field("file", b"%PDF-", filename="a.pdf")
        async with front.http.post(front.url + "/v1/files", data=upload) as reply:
            file = {"type": "file", "file": {"file_id": (await reply.json())["id"]}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "hello \ud83d"}, file]}]
        refused = await front.post("/v1/chat/completions", make_chat_body(model="b", messages=messages))
        assert refused.status == 400 and refused.json["error"]["param"].startswith("messages[0].content")


async def test_no_model_is_loaded_for_a_body_that_is_no_json() -> None:
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        reply = await front.post("/v1/chat/completions", b'{"model": "b",')
        assert reply.status == 400 and reply.json["error"]["code"] == "invalid_json"
        assert front.models.lives == []


async def test_a_path_for_vectors_finds_the_model_that_gives_them() -> None:
    models = FakeModels(script=say_name, tasks={"b": "embed"})
    async with run_models_front(models, limit=2) as front:
        await front.post("/v1/embeddings", {"input": "hello"})
        assert [slot.state for slot in front.pool.slots] == ["unloaded", "ready"]


@pytest.mark.parametrize(("field", "loaded"), [("", "b"), ("model", "a")])
async def test_a_form_goes_to_the_model_that_it_names(field: str, loaded: str) -> None:
    """Else to the first one that transcribes. None of these does, so that each refuses it by its name."""
    parts = {"file": "x" * 200_000, **({field: "a"} if field else {})}
    body = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in parts.items()
    )
    models = FakeModels(script=say_name, tasks={"b": "transcribe"})
    async with run_models_front(models, limit=2) as front:
        kind = {"Content_Type": "multipart/form-data; boundary=x"}
        reply = await front.post("/v1/audio/transcriptions", body + "--x--\r\n", **kind)
        assert reply.status == 400
        assert f"model: '{loaded}' transcribes no sound" in reply.json["error"]["message"]
        assert [slot.name for slot in front.pool.slots if slot.state == "ready"] == [loaded]


async def test_an_unknown_name_is_refused_in_the_words_of_each_api() -> None:
    async with run_models_front(FakeModels(script=say_name)) as front:
        reply = await front.post("/v1/chat/completions", make_chat_body(model="c"))
        assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"
        assert "the names are a, b" in reply.json["error"]["message"]
        reply = await front.post("/api/chat", {"model": "c", "messages": []})
        assert reply.status == 404 and "is not served here" in reply.json["error"]
        assert (await front.get("/v1/models/c")).status == 404
        assert not front.models.lives


async def test_all_models_are_listed_with_their_state() -> None:
    async with run_models_front(FakeModels(script=say_name)) as front:
        await front.post("/v1/chat/completions", make_chat_body(model="b"))
        listed = (await front.get("/v1/models")).json["data"]
        assert [(each["id"], each["state"]) for each in listed] == [("a", "unloaded"), ("b", "ready")]
        assert (await front.get("/v1/models/a")).json["state"] == "unloaded"
        page = await front.get("/v1/models", anthropic_version="2023-06-01")
        assert [each["id"] for each in page.json["data"]] == ["a", "b"]
        one = await front.get("/v1/models/b", anthropic_version="2023-06-01")
        assert one.json == page.json["data"][1]
        tags = (await front.get("/api/tags")).json["models"]
        assert [each["name"] for each in tags][:1] == ["a:latest"]
        loaded = (await front.get("/api/ps")).json["models"]
        assert [each["name"] for each in loaded] == ["b:latest"]
        assert loaded[0]["expires_at"].startswith("9999")
        assert (await front.post("/api/show", {"model": "a"})).json == {"details": "a"}
        status = (await front.get("/v1/status")).json
        assert [(each["model"], each["state"]) for each in status["models"]] == [
            ("a", "unloaded"),
            ("b", "ready"),
        ]
        assert status["models_memory"] == {"limit": 1, "used": 1}
        metrics = (await front.get("/metrics")).body.decode()
        assert 'mlxrun_model_loaded{model="b"} 1.0' in metrics
        assert 'mlxrun_ready{model="b"} 1.0' in metrics


async def test_no_model_is_loaded_for_lists() -> None:
    async with run_models_front(FakeModels(script=say_name)) as front:
        for path in ("/v1/models", "/api/tags", "/api/ps", "/v1/status", "/metrics", "/v1/cache", "/health"):
            assert (await front.get(path)).status == 200, path
        assert not front.models.lives


async def test_models_are_loaded_and_unloaded_on_demand() -> None:
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        assert (await front.post("/v1/models/load", {"model": "b"})).json["state"] == "ready"
        assert (await front.post("/v1/models/unload", {"model": "b-alias"})).json["state"] == "unloaded"
        assert front.models.lives[0].closed
        for body, param in (({}, "model"), ({"model": 3}, "model"), ({"modle": "a"}, "modle")):
            reply = await front.post("/v1/models/load", body)
            assert reply.status == 400 and reply.json["error"]["param"] == param


async def test_the_model_of_a_body_is_warmed() -> None:
    """It is loaded for that. What is pinned belongs to its process."""
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        assert (await front.request("DELETE", "/v1/cache/pinned/5f")).status == 404
        made = await front.post("/v1/cache/warm", {"body": {**BODIES["/v1/messages"], "model": "b"}})
        assert made.status == 200, made.json
        assert [slot.name for slot in front.pool.slots if slot.state == "ready"] == ["b"]
        (shown,) = (await front.get("/v1/cache")).json["models"]
        assert shown["model"] == "b" and shown["pinned"] == [made.json["pinned"]]
        path = f"/v1/cache/pinned/{made.json['pinned']['id']}"
        assert [(await front.request("DELETE", path)).status for _ in range(2)] == [200, 404]
        default = await front.post("/v1/cache/warm", {"body": BODIES["/v1/responses"]})
        assert default.status == 200 and front.pool.slots[0].state == "ready"


async def test_keys_without_the_role_admin_load_nothing() -> None:
    keys = {
        "me": ApiKeySettings("sesame-open-up-now", "inference"),
        "root": ApiKeySettings("sesame-open-up-root", "admin"),
    }
    async with run_models_front(FakeModels(script=say_name), api_keys=keys) as front:
        for key, status in (("sesame-open-up-now", 403), ("sesame-open-up-root", 200)):
            reply = await front.post("/v1/models/load", {"model": "a"}, authorization=f"Bearer {key}")
            assert reply.status == status


async def test_ollamas_keep_alive_holds_for_the_loaded_model() -> None:
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        body = {"model": "a", "messages": make_chat_body()["messages"], "stream": False}
        await front.post("/api/chat", {**body, "keep_alive": "1h"})
        assert front.pool.slots[0].keep_alive == 3600.0
        await front.post("/api/chat", {**body, "keep_alive": 0})
        await until(lambda: front.pool.slots[0].state == "unloaded")
        assert (await front.post("/api/chat", {**body, "keep_alive": "soon"})).status == 400


async def test_ollamas_keep_alive_is_no_field_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log said that the model stays loaded, and `server.strict_fields` refused it."""
    ignored: list[str] = []
    monkeypatch.setattr("mlxrun.api.body_schema.log_ignored", lambda field, reason: ignored.append(field))
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        body = {"model": "a", "messages": make_chat_body()["messages"], "stream": False}
        reply = await front.post("/api/chat", {**body, "keep_alive": "1h", "shift": True})
        assert (reply.status, reply.json["message"]["content"], ignored) == (200, "I am a", ["shift"])
        twice = b'{"model": "a", "model": "a", "keep_alive": 5, "messages": []}'
        assert "occurs twice" in (await front.post("/api/chat", twice)).json["error"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(300, 300.0), ("5m", 300.0), ("1h30m", 5400.0), ("0", 0.0), ("250ms", 0.25), (-1, None), ("-1m", None)],
)
def test_durations_are_those_of_ollama(given: Any, seconds: float | None) -> None:
    assert read_keep_alive(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5", True, None, [], "1m2", float("inf")])
def test_other_durations_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="keep_alive"):
        read_keep_alive(given)


async def test_a_stored_response_stays_with_its_model() -> None:
    async with run_models_front(FakeModels(script=say_name), limit=2) as front:
        first = (await front.post("/v1/responses", {"model": "b", "input": "hello"})).json
        again = await front.post("/v1/responses", {"previous_response_id": first["id"], "input": "more"})
        assert again.status == 200 and again.json["model"] == "b"
        assert (await front.get(f"/v1/responses/{first['id']}")).json["id"] == first["id"]
        other = {"model": "a", "previous_response_id": first["id"], "input": "more"}
        refused = await front.post("/v1/responses", other)
        assert refused.status == 400 and "is of b, not of a" in refused.json["error"]["message"]


@asynccontextmanager
async def send_to_held_model(**headers: str) -> AsyncIterator[tuple[ModelsFront, asyncio.Task[Reply]]]:
    """A front, and a request that waits while its model is loaded, which ends after the block."""
    models = FakeModels(script=say_name)
    async with run_models_front(models) as front:
        models.held.clear()
        body = make_chat_body(model="a")
        sent = asyncio.create_task(front.post("/v1/chat/completions", body, **headers))
        await until(lambda: front.pool.slots[0].waiting)
        yield front, sent
        models.held.set()


async def test_a_request_that_waits_for_its_model_can_be_cancelled() -> None:
    async with send_to_held_model(x_request_id="mine") as (front, sent):
        assert (await front.post("/v1/requests/other/cancel", {})).status == 404
        assert (await front.post("/v1/requests/mine/cancel", {})).json == {"id": "mine", "cancelled": True}
        assert (await sent).status == 499


async def test_a_request_that_waits_for_its_model_is_refused_when_the_server_stops() -> None:
    async with send_to_held_model() as (front, sent):
        front.app[ENGINE].start_draining()
        reply = await asyncio.wait_for(sent, 10)
        assert reply.status == 503 and reply.headers["Retry-After"]
        assert reply.json["error"]["code"] == "shutting_down"


async def test_a_client_that_disconnects_waits_no_more() -> None:
    async with send_to_held_model() as (front, sent):
        sent.cancel()
        await until(lambda: not front.pool.slots[0].waiting)


async def test_a_model_that_dies_fails_its_requests_and_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxrun.server.lifecycle.GRACE_SECONDS", 0.1)  # a death waits for no request
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script("begin", gate.wait, "end"))
    async with run_models_front(models) as front:
        sent = asyncio.create_task(front.post("/v1/chat/completions", make_chat_body(model="a", stream=True)))
        await until(lambda: models.lives and models.lives[0].engine.requests)
        await models.lives[0].close()
        models.lives[0].kill()
        reply = await sent
        assert "a died while it answered" in reply.body.decode()
        gate.set()
        await until(lambda: front.pool.slots[0].state == "unloaded")
        front.pool.slots[0].failures = 0
        assert read_text(await front.post("/v1/chat/completions", make_chat_body(model="a"))) == "beginend"


async def test_counters_never_go_back_when_models_come_and_go() -> None:
    """Nor do refusals at the front get lost."""
    async with run_models_front(FakeModels(script=say_name)) as front:
        for name in ("a", "b", "a", "nobody"):
            await front.post("/v1/chat/completions", make_chat_body(model=name))
        lines = (await front.get("/metrics")).body.decode().splitlines()
        counted = [line for line in lines if line.startswith("mlxrun_requests_total")]
        assert 'mlxrun_requests_total{model="a",status="200",surface="openai"} 2.0' in counted
        assert 'mlxrun_requests_total{model="b",status="200",surface="openai"} 1.0' in counted
        assert 'mlxrun_requests_total{model="front",status="404",surface="openai"} 1.0' in counted
        assert 'mlxrun_ready{model="front"} 1.0' in lines


async def test_counters_are_read_with_a_key_that_may() -> None:
    keys = {"me": "sesame-open-up-now"}
    async with run_models_front(FakeModels(script=say_name), api_keys=keys) as front:
        headers = {"authorization": "Bearer sesame-open-up-now"}
        for name in ("a", "b"):
            await front.post("/v1/chat/completions", make_chat_body(model=name), **headers)
        text = (await front.get("/metrics", **headers)).body.decode()
        assert 'mlxrun_requests_total{model="a",status="200",surface="openai"} 1.0' in text


async def test_a_stop_lets_processes_end_their_streams() -> None:
    """They say so in the words of each API, as only they can."""
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script("begin", gate.wait, "end"))
    async with run_models_front(models) as front:
        body = make_chat_body(model="a", stream=True)
        running = asyncio.create_task(front.post("/v1/chat/completions", body))
        await until(lambda: models.lives and models.lives[0].engine.requests)
        front.app[ENGINE].start_draining()
        assert models.lives[0].is_draining
        assert (await front.post("/v1/chat/completions", body)).status == 503
        gate.set()
        assert (await running).events[-1][1] == "[DONE]"
        models.lives[0].kill()  # a process ends once it has no requests
        await until(lambda: front.pool.slots[0].state == "unloaded")
        assert front.pool.slots[0].error is None


MESSAGES: Any = make_chat_body()["messages"]
# Of each API: the path and the body of a stream, what keeps it alive, and what its last event has.
STREAMS = [
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, b": preparing", b"[DONE]"),
    (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9, "stream": True},
        b": preparing",
        b"message_stop",
    ),
    ("/v1/responses", {"input": "hello", "stream": True}, b": preparing", b"response.completed"),
    ("/api/chat", {"messages": MESSAGES}, b'{"model":"a",', b'"done":true'),
]
APIS = ("openai", "anthropic", "responses", "ollama")


async def read_begun(front: ModelsFront, path: str, body: Any, ping: bytes) -> bytes:
    """A stream whose model is loaded when it has been kept alive twice; what follows."""
    front.models.held.clear()
    sent = front.http.post(f"{front.url}{path}", json={"model": "a", **body})
    async with asyncio.timeout(60), sent as response:
        for _ in range(2):
            assert (await response.content.readuntil(ping)).endswith(ping)
        assert response.status == 200 and front.pool.slots[0].waiting
        front.models.held.set()
        return await response.read()


@pytest.mark.parametrize(("path", "body", "ping", "last"), STREAMS, ids=APIS)
async def test_a_stream_is_kept_alive_while_its_model_is_loaded(
    path: str, body: Any, ping: bytes, last: bytes
) -> None:
    async with run_models_front(FakeModels(script=say_name), keepalive=0.1) as front:
        assert last in await read_begun(front, path, body, ping)


@pytest.mark.parametrize("api", APIS)
async def test_what_fails_after_that_is_the_last_event(api: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the words of each API, as its status is sent: a model that cannot be loaded, and a refusal. Neither
    is a bug."""
    path, body, ping, _ = STREAMS[APIS.index(api)]
    frame = {
        "openai": b'data: {"error":{"message":"%s',
        "anthropic": b'event: error\ndata: {"type":"error","error":{"type":"%s',
        "responses": b'event: error\ndata: {"type":"error","sequence_number":0,"param":%s',
        "ollama": b'{"error":"%s',
    }[api].partition(b"%s")[0]
    wrong: Any = {"options": {"temperature": "hot"}} if api == "ollama" else {"temperature": "hot"}
    for broken, more, said in (({"a"}, {}, b"its files are broken"), ((), wrong, b"temperature")):
        models = FakeModels(script=say_name, broken=set(broken))
        async with run_models_front(models, keepalive=0.1) as front:
            found = await read_begun(front, path, body | more, ping)
            assert frame in found and said in found.partition(frame)[2]
    assert "Error" not in caplog.text


async def test_a_stream_that_breaks_inside_an_event_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would be part of the event."""
    async with (
        run_models_front(FakeModels(script=say_name), keepalive=0.1) as front,
        AsyncExitStack() as stack,
    ):

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            headers = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
            writer.write(f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n7\r\ndata: {{\r\n".encode())
            writer.close()

        async def start(model: FakeModel) -> str:
            await model.models.held.wait()
            server = await stack.enter_async_context(await asyncio.start_server(answer, "127.0.0.1", 0))
            return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        monkeypatch.setattr(FakeModel, "start", start)
        path, body, ping, _ = STREAMS[0]
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_begun(front, path, body, ping)
