"""The front before workers that really listen, whose engines follow a script."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import aiohttp
import pytest

from mlxrun.cluster.servers import server_relay
from mlxrun.cluster.servers.server_actor import make_worker_app
from mlxrun.cluster.servers.server_relay import SECRET_HEADER
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.responses.response_runs import RESPONSES
from tests.api.test_prompt_prefix import BODIES
from tests.helpers.command_processes import PATIENCE
from tests.helpers.fake_servers import FakeServer, Front, ServerFleet, run_front
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Script, make_chat_body, make_script

LONG = "a text that is long enough for a prefix of its own, which is longer than sixty-four bytes"


def say_number(number: int) -> Script:
    return make_script(f"worker {number}")


def read_text(reply: Any) -> str:
    found: str = reply.json["choices"][0]["message"]["content"]
    return found


async def test_answers_are_those_of_a_worker() -> None:
    """JSON, streams, other surfaces, errors and HEAD; with the id of the request."""
    async with run_front(ServerFleet(say_number), 1) as front:
        reply = await front.post("/v1/chat/completions", make_chat_body(), x_request_id="mine")
        assert reply.status == 200 and read_text(reply) == "worker 0"
        assert reply.headers["x-request-id"] == "mine"
        events = (await front.post("/v1/chat/completions", make_chat_body(stream=True))).events
        assert events[-1][1] == "[DONE]" and len(events) > 5
        body = {"model": "m", "max_tokens": 9, "messages": make_chat_body()["messages"]}
        message = await front.post("/v1/messages", body, anthropic_version="2023-06-01")
        assert message.json["content"][0]["text"] == "worker 0"
        refused = await front.post("/v1/chat/completions", {"messages": 3})
        assert refused.status == 400 and refused.json["error"]["param"] == "messages"
        head = await front.request("HEAD", "/v1/models")
        assert head.status == 200 and head.body == b"" and int(head.headers["Content-Length"]) > 10
        assert (await front.post("/v1/nothing", {})).status == 404
        assert (await front.get("/v1/models", accept_encoding="gzip")).json["data"]


async def test_the_page_is_the_fronts_and_may_use_the_workers() -> None:
    async with run_front(ServerFleet(say_number), 1) as front:
        assert b"<!doctype html>" in (await front.get("/ui")).body
        reply = await front.post("/v1/chat/completions", make_chat_body(), origin=front.url)
        assert read_text(reply) == "worker 0"


def test_a_worker_stores_responses_in_memory() -> None:
    """Whatever the config says: another machine may take its place."""
    app = make_worker_app(Config(server=ServerSettings(store_days=7.0)), 1, "secret")
    assert app[RESPONSES].stores_any and not app[RESPONSES].store.is_durable


async def test_keys_are_checked_before_any_worker() -> None:
    async with run_front(ServerFleet(say_number), 1, api_keys={"me": "sesame-open-up"}) as front:
        assert (await front.post("/v1/chat/completions", make_chat_body())).status == 401
        assert front.fleet.workers[0].engine.requests == []
        assert (await front.get("/health")).status == 200


async def test_workers_refuse_everybody_else() -> None:
    async with run_front(ServerFleet(say_number), 1) as front:
        for headers in ({}, {SECRET_HEADER: "guess"}, {SECRET_HEADER: "s3cr\u00e9t"}):
            async with front.http.get(front.slots[0].url + "/v1/models", headers=headers) as reply:
                assert reply.status == 403
        # A client cannot pass a secret through the front.
        assert (await front.get("/v1/models", x_mlxrun_relay="guess")).status == 200


async def test_a_client_that_disconnects_ends_its_request_on_the_worker() -> None:
    gate = asyncio.Event()
    async with run_front(ServerFleet(lambda _: make_script("begin", gate.wait, "end")), 1) as front:
        engine = front.fleet.workers[0].engine
        async with front.http.post(
            front.url + "/v1/chat/completions", json=make_chat_body(stream=True)
        ) as reply:
            await reply.content.readline()
        await until(lambda: engine.aborted)
        with pytest.raises(TimeoutError):
            await front.http.post(
                front.url + "/v1/chat/completions",
                json=make_chat_body(),
                timeout=aiohttp.ClientTimeout(total=0.2),
            )
        await until(lambda: len(engine.aborted) == 2)
        await until(lambda: front.slots[0].running == 0)


async def test_conversations_stay_and_strangers_spread() -> None:
    async with run_front(ServerFleet(say_number), 3) as front:
        homes = []
        for talk in range(3):
            turns = [{"role": "user", "content": f"{talk} {LONG}"}]
            seen = set()
            for _ in range(3):
                text = read_text(await front.post("/v1/chat/completions", {"messages": turns}))
                seen.add(text)
                turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
            assert len(seen) == 1
            homes.append(seen.pop())
        assert len(set(homes)) == 3


async def test_responses_and_conversations_go_to_the_worker_that_has_them() -> None:
    async with run_front(ServerFleet(say_number), 2) as front:
        for _ in range(4):
            first = (await front.post("/v1/responses", {"input": "hello"})).json
            said = first["output"][0]["content"][0]["text"]
            body = {"input": "more", "previous_response_id": first["id"]}
            later = (await front.post("/v1/responses", body)).json
            assert later["output"][0]["content"][0]["text"] == said
            assert (await front.get(f"/v1/responses/{first['id']}")).json["id"] == first["id"]
            talk = (await front.post("/v1/conversations", {})).json["id"]
            reply = await front.post("/v1/responses", {"input": "hello", "conversation": talk})
            assert reply.status == 200
            items = (await front.get(f"/v1/conversations/{talk}/items")).json["data"]
            assert len(items) == 2
        assert all(worker.engine.requests for worker in front.fleet.workers)
        for name in ("resp_fff", "resp_xyz", "resp_", "conv_001"):
            assert (await front.get(f"/v1/responses/{name}")).status == 404


async def kill_on_request(front: Front, count: int) -> None:
    """Kill each worker once it has a request, `count` in all."""
    for _ in range(count):
        await until(lambda: any(w.engine.running and not w.closed for w in front.fleet.workers))
        worker = next(w for w in front.fleet.workers if w.engine.running)
        worker.kill()
        await until(lambda w=worker: w.closed)  # type: ignore[misc]


async def test_a_request_whose_worker_dies_goes_to_another_one() -> None:
    """Once: a second death may be its own fault, and it is not sent to a third worker."""
    gate = asyncio.Event()
    async with run_front(ServerFleet(lambda _: make_script(gate.wait, "done")), 3) as front:
        asking = asyncio.create_task(front.post("/v1/chat/completions", make_chat_body()))
        await kill_on_request(front, 1)
        gate.set()
        assert read_text(await asking) == "done"
        gate.clear()
        asking = asyncio.create_task(front.post("/v1/chat/completions", make_chat_body()))
        await kill_on_request(front, 2)
        reply = await asking
        assert reply.status == 500 and reply.json["error"]["code"] == "worker_died"


@pytest.mark.parametrize(
    ("path", "last"),
    [("/v1/chat/completions", "engine_unavailable"), ("/v1/messages", "error"), ("/v1/responses", None)],
)
async def test_a_stream_whose_worker_dies_ends_with_an_error(
    path: str, last: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Or is cut, so that nobody takes it for complete. Log and metrics have the error."""
    caplog.set_level(logging.INFO, "mlxrun.server.http.request_log")
    gate = asyncio.Event()
    async with run_front(ServerFleet(lambda _: make_script("begin", gate.wait)), 1) as front:
        body = {"model": "m", "max_tokens": 9, "messages": make_chat_body()["messages"], "stream": True}
        if path == "/v1/responses":
            body = {"input": "hello", "stream": True}
        async with front.http.post(front.url + path, json=body) as reply:
            text = b""
            while b"in" not in text:
                assert not reply.content.at_eof(), text
                text += await reply.content.readany()
            front.fleet.workers[0].cut()
            if last is None:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await reply.read()
            else:
                assert last in (await reply.text()).strip().rpartition("data: ")[2]
        line = f"POST {path} " + ("503" if last is None else "200")
        await until(lambda: any(line in each and "engine_unavailable" in each for each in caplog.messages))
        metrics = (await front.get("/metrics")).body.decode()
        assert [x for x in metrics.splitlines() if 'worker="front"' in x and x.endswith(" 1.0")]
        assert last is None or "stream ended: engine_unavailable" in caplog.text


async def test_the_log_has_the_code_and_the_field_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun.server.http.request_log")
    async with run_front(ServerFleet(say_number), 1) as front:
        await front.post("/v1/chat/completions", {"messages": 3}, x_request_id="mine")
    ends = {each.rpartition("s ")[2] for each in caplog.messages if each.startswith("mine ")}
    assert ends == {"invalid_type: messages"}


async def test_a_worker_that_is_about_to_stop_is_passed_over() -> None:
    """Its 503 is not the client's, who gets an answer from another one."""
    async with run_front(ServerFleet(say_number), 2) as front:
        app = front.fleet.workers[0].app
        assert app is not None
        app[ENGINE].draining = True
        assert [read_text(await front.post("/v1/chat/completions", make_chat_body())) for _ in range(3)] == [
            "worker 1"
        ] * 3


async def test_a_restart_fails_no_request() -> None:
    """Clients ask all the time, while both workers are restarted."""
    async with run_front(ServerFleet(lambda _: make_script("yes")), 2) as front:
        front.pool.restart_soon(30.0)
        while front.pool.is_restarting:
            replies = await asyncio.gather(
                *(front.post("/v1/chat/completions", make_chat_body()) for _ in range(3))
            )
            assert {reply.status for reply in replies} == {200}
        assert len(front.fleet.workers) == 4


async def test_what_all_workers_say() -> None:
    async with run_front(ServerFleet(say_number), 2) as front:
        for _ in range(3):
            await front.post("/v1/chat/completions", make_chat_body())
        status = (await front.get("/v1/status")).json
        assert status["status"] == "ok"
        assert [each["state"] for each in status["workers"]] == ["ready", "ready"]
        assert all(each["status"]["limits"] for each in status["workers"])
        metrics = (await front.get("/metrics")).body.decode()
        counts = [line for line in metrics.splitlines() if "requests_total{" in line and "openai" in line]
        assert sorted(line.rpartition(" ")[2] for line in counts) == ["1.0", "2.0"]
        assert all('worker="' in line for line in counts)
        assert metrics.count("# TYPE mlxrun_requests_total") == 1
        assert [each["worker"] for each in (await front.get("/v1/cache")).json["workers"]] == [0, 1]
        assert (await front.request("DELETE", "/v1/cache")).status == 200
        assert [worker.engine.cleared for worker in front.fleet.workers] == [1, 1]


async def test_a_worker_that_hangs_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is suspended, or whose machine has just vanished."""
    monkeypatch.setattr(server_relay, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with run_front(ServerFleet(say_number), 2) as front, asyncio.timeout(PATIENCE):
            front.slots[1].url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            workers = (await front.get("/v1/status")).json["workers"]
            assert [each["status"] is None for each in workers] == [False, True]
            assert b'worker="0"' in (await front.get("/metrics")).body


async def test_all_workers_are_warmed() -> None:
    """A client's requests may go to any of them."""
    async with run_front(ServerFleet(say_number), 2) as front:
        made = (await front.post("/v1/cache/warm", {"body": BODIES["/v1/messages"]})).json["workers"]
        assert [each["worker"] for each in made] == [0, 1]
        (prefix_id,) = {each["pinned"]["id"] for each in made}
        for status in (200, 404):
            assert (await front.request("DELETE", f"/v1/cache/pinned/{prefix_id}")).status == status
        assert not any(worker.engine.pinned_prefixes for worker in front.fleet.workers)


async def test_cancelling_reaches_the_worker_that_has_the_request() -> None:
    gate = asyncio.Event()
    async with run_front(ServerFleet(lambda _: make_script("begin", gate.wait)), 2) as front:

        def list_running() -> list[FakeServer]:
            return [worker for worker in front.fleet.workers if worker.engine.running]

        asking = asyncio.create_task(
            front.post("/v1/chat/completions", make_chat_body(), x_request_id="mine")
        )
        await until(list_running)
        assert (await front.post("/v1/requests/other/cancel", {})).status == 404
        assert (await front.post("/v1/requests/mine/cancel", {})).json == {"id": "mine", "cancelled": True}
        assert (await asking).status == 499


async def test_what_is_not_available() -> None:
    """Files and batches, which the document leaves out."""
    async with run_front(ServerFleet(say_number), 1) as front:
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
            reply = await front.post(path, {})
            assert reply.status == 404 and "not available with --ray" in reply.body.decode()
        paths = (await front.get("/openapi.json")).json["paths"]
        assert "/v1/chat/completions" in paths and not any("batch" in path for path in paths)


async def test_a_machine_that_vanishes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends no connection: the system has to ask it, also while a worker computes."""
    opened: list[socket.socket] = []

    def remember(address: Any) -> socket.socket:
        opened.append(server_relay.open_socket(address))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(server_relay, "open_socket", remember)
        async with run_front(ServerFleet(say_number), 1) as front:
            patch.undo()
            assert read_text(await front.post("/v1/chat/completions", make_chat_body())) == "worker 0"
            (found,) = opened
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_no_worker_is_ready() -> None:
    """503 until the new worker is; readiness says so, and liveness stays."""
    fleet = ServerFleet(say_number)
    async with run_front(fleet, 1) as front:
        fleet.held.clear()
        fleet.workers[0].kill()
        await until(lambda: front.slots[0].state == "starting")
        assert (await front.get("/health/ready")).status == 503
        assert (await front.get("/health/live")).status == 200
        reply = await front.post("/v1/chat/completions", make_chat_body())
        assert reply.status == 503 and int(reply.headers["Retry-After"]) >= 1
        fleet.held.set()
        await until(lambda: front.slots[0].state == "ready")
        assert (await front.post("/v1/chat/completions", make_chat_body())).status == 200
