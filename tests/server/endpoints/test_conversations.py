"""/v1/conversations before a scripted engine: items, responses that belong to one, locks and limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead
from mlxrun.server.responses.response_runs import RESPONSES
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Serving, make_script, run_server, server_config

URL = "/v1/conversations"
RESPONSES_URL = "/v1/responses"


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


async def create(s: Serving, *items: Any, **fields: Any) -> str:
    reply = await s.post(URL, {"items": list(items), **fields})
    assert reply.status == 200, reply.body
    return str(reply.json["id"])


async def list_texts(s: Serving, name: str) -> list[str]:
    items = (await s.get(f"{URL}/{name}/items?order=asc&limit=100")).json["data"]
    return [item["content"][0]["text"] for item in items]


async def test_a_conversation_is_created_changed_and_deleted() -> None:
    async with run_server() as s:
        made = (await s.post(URL, {"metadata": {"a": "b"}})).json
        assert made.keys() == {"id", "object", "created_at", "metadata"}
        assert made["object"] == "conversation" and made["metadata"] == {"a": "b"}
        path = f"{URL}/{made['id']}"
        assert (await s.get(path)).json == made
        changed = (await s.post(path, {"metadata": {"c": "d"}})).json
        assert changed == {**made, "metadata": {"c": "d"}} == (await s.get(path)).json
        deleted = (await s.request("DELETE", path)).json
        assert deleted == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        for method, where in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/x")):
            assert (await s.request(method, path + where)).status == 404
        assert (await s.post(path, {"metadata": {}})).status == 404
        assert s.app[RESPONSES].store.bytes == 0


async def test_items_are_added_listed_and_deleted() -> None:
    async with run_server() as s:
        name = await create(s, user("a"))
        path = f"{URL}/{name}/items"
        added = (
            await s.post(f"{path}?include=message.input_image.image_url", {"items": [user("b"), user("c")]})
        ).json
        assert [item["content"][0]["text"] for item in added["data"]] == ["b", "c"]
        assert (added["object"], added["has_more"]) == ("list", False)
        assert added["last_id"] == added["data"][1]["id"]
        newest = (await s.get(f"{path}?limit=2")).json
        assert newest["data"] == added["data"][::-1] and newest["has_more"]
        one = added["data"][0]
        assert (await s.get(f"{path}/{one['id']}")).json == one
        assert (await s.request("DELETE", f"{path}/{one['id']}")).json["id"] == name
        assert await list_texts(s, name) == ["a", "c"]
        assert (await s.get(f"{path}/{one['id']}")).status == 404
        for url in (path, f"{path}/{added['last_id']}"):
            refused = await s.get(f"{url}?include=message.input_image.url")
            assert (refused.status, refused.json["error"]["param"]) == (400, "include")
        twice = await s.post(path, {"items": [{**user("d"), "id": added["last_id"]}]})
        assert (twice.status, twice.json["error"]["param"]) == (400, "items[0].id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"type": "poem"}]}, "items[0].type"),
        ({"items": "hello"}, "items"),
        ({"items": [5]}, "items[0]"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"name": "x"}, "name"),
        ([], "body"),
    ],
)
async def test_bad_bodies(body: Any, param: str) -> None:
    async with run_server() as s:
        reply = await s.post(URL, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("streaming", [False, True])
async def test_responses_of_a_conversation_begin_with_its_items_and_are_added_to_it(streaming: bool) -> None:
    """The prompt is that of all items; the twin without the conversation has another one."""
    async with run_server(script=make_script("Bob")) as s:
        name = await create(s, user("I am Bob."), metadata={"a": "b"})
        body = {
            "input": "Who am I?",
            "conversation": {"id": name},
            "instructions": "Be kind.",
            "stream": streaming,
        }
        reply = await s.post(RESPONSES_URL, body)
        response = reply.events[-2][1]["response"] if streaming else reply.json
        assert response["conversation"] == {"id": name} and response["previous_response_id"] is None
        assert await list_texts(s, name) == ["I am Bob.", "Who am I?", "Bob"]
        assert (await s.get(f"{URL}/{name}")).json["metadata"] == {"a": "b"}
        await s.post(RESPONSES_URL, {"input": "Sure?", "conversation": name})
        whole = [user("I am Bob."), user("Who am I?"), {"role": "assistant", "content": "Bob"}, user("Sure?")]
        await s.post(RESPONSES_URL, {"input": whole})
        await s.post(RESPONSES_URL, {"input": "Sure?"})
        prompts = [request.prompt for request in s.engine.requests]
        assert prompts[1] == prompts[2] != prompts[3]
        assert len(await list_texts(s, name)) == 5
        counted = await s.post(f"{RESPONSES_URL}/input_tokens", {"conversation": name, "input": "x"})
        assert counted.json["input_tokens"] > len(prompts[1])
        await s.settle()


async def test_a_conversation_keeps_what_is_not_stored_as_a_response() -> None:
    async with run_server(script=make_script("Bob")) as s:
        name = await create(s)
        sent = (await s.post(RESPONSES_URL, {"input": "a", "conversation": name, "store": False})).json
        assert (await s.get(f"{RESPONSES_URL}/{sent['id']}")).status == 404
        assert await list_texts(s, name) == ["a", "Bob"]


async def test_a_failed_response_leaves_the_conversation_as_it_was() -> None:
    async with run_server(script=make_script("half", EngineDead("dead"))) as s:
        name = await create(s, user("a"))
        assert (await s.post(RESPONSES_URL, {"input": "b", "conversation": name})).status == 503
        events = (await s.post(RESPONSES_URL, {"input": "b", "conversation": name, "stream": True})).events
        assert events[-2][0] == "response.failed"
        assert await list_texts(s, name) == ["a"]
        await s.settle()


async def test_a_conversation_is_locked_while_a_response_runs() -> None:
    """Nothing is lost between two that would begin with the same items."""
    go = asyncio.Event()
    async with run_server(script=make_script(go.wait, "Bob")) as s:
        name, other = await create(s, user("a")), await create(s)
        body = {"input": "b", "conversation": name}
        asking = asyncio.create_task(s.post(RESPONSES_URL, body))
        await until(lambda: s.engine.requests)
        path = f"{URL}/{name}"
        for reply in (
            await s.post(RESPONSES_URL, body),
            await s.post(f"{path}/items", {"items": [user("x")]}),
            await s.post(path, {"metadata": {}}),
            await s.request("DELETE", path),
        ):
            assert (reply.status, reply.json["error"]["code"]) == (400, "conversation_locked")
        assert (await s.get(path)).status == 200
        go.set()
        assert (await asking).status == 200
        assert (await s.post(RESPONSES_URL, {"input": "x", "conversation": other})).status == 200
        assert (await s.post(RESPONSES_URL, body)).status == 200
        assert await list_texts(s, name) == ["a", "b", "Bob", "b", "Bob"]


async def test_a_disconnected_client_leaves_no_lock() -> None:
    never = asyncio.Event()
    async with run_server(script=make_script(never.wait)) as s:
        name = await create(s, user("a"))
        asking = asyncio.create_task(s.post(RESPONSES_URL, {"input": "b", "conversation": name}))
        await until(lambda: s.engine.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await s.settle()
        assert (await s.post(f"{URL}/{name}", {"metadata": {}})).status == 200
        assert await list_texts(s, name) == ["a"]


async def test_a_conversation_is_visible_to_its_owner_only() -> None:
    config = server_config(api_keys={"ann": "sk-ann", "ben": "sk-ben"})
    async with run_server(config) as s:
        made = (await s.post(URL, {"items": [user("a")]}, x_api_key="sk-ann")).json
        path = f"{URL}/{made['id']}"
        item = (await s.get(f"{path}/items", x_api_key="sk-ann")).json["data"][0]
        for method, where in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/items"),
            ("GET", f"/items/{item['id']}"),
        ):
            assert (await s.request(method, path + where, x_api_key="sk-ben")).status == 404
        body = {"input": "x", "conversation": made["id"]}
        refused = await s.post(RESPONSES_URL, body, x_api_key="sk-ben")
        assert (refused.status, refused.json["error"]["code"]) == (400, "conversation_not_found")
        assert (await s.post(RESPONSES_URL, body, x_api_key="sk-ann")).status == 200


async def test_conversations_count_in_the_limits_of_the_store() -> None:
    async with run_server(server_config(store_responses=2)) as s:
        first = await create(s, user("a"))
        await create(s)
        assert (await s.post(RESPONSES_URL, {"input": "x", "conversation": first})).status == 200
        assert await list_texts(s, first) != [], "the one that is used stays"
        await create(s)
        await create(s)
        assert (await s.get(f"{URL}/{first}")).status == 404
        gone = await s.post(RESPONSES_URL, {"input": "x", "conversation": first})
        assert gone.json["error"]["code"] == "conversation_not_found"
    async with run_server(server_config(store_bytes=20_000)) as s:
        large = await s.post(URL, {"items": [user("x" * 30_000)]})
        assert (large.status, large.json["error"]["param"]) == (400, "items")
        assert len(s.app[RESPONSES].store) == 0
    async with run_server(server_config(store_responses=0)) as s:
        assert (await s.post(URL, {})).status == 400
