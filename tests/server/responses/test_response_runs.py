"""Running responses: what those who follow get, and how conversations are held."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.config.settings import ServerSettings
from mlxrun.core.errors import NotFound, RequestError
from mlxrun.server.responses.response_runs import Responses, RunningResponse, encode_events
from mlxrun.server.responses.response_store import StoredObject


def make_run(owner: str = "") -> Any:
    """A response whose parts are as small as possible."""
    live: Any = SimpleNamespace(key_name=owner)
    writer: Any = SimpleNamespace(response={"id": "resp_1", "status": "queued"})
    request: Any = SimpleNamespace(context=())
    return RunningResponse(live, request, writer)


def make_responses(**settings: Any) -> Responses:
    return Responses(ServerSettings(**settings))


def store(responses: Responses, owner: str, kind: str, name: str, *items: str) -> None:
    body = {"id": name, "object": kind, "output": []}
    found = StoredObject.measure(owner, body, [{"id": item} for item in items])
    assert responses.store.add(found)


async def collect(run: RunningResponse, start: int) -> list[str]:
    return [name async for name, _ in run.follow(start)]


async def test_every_follower_gets_every_event_once() -> None:
    """Whenever it begins, and however far it is behind; the end ends it."""
    run = make_run()
    followers = [asyncio.create_task(collect(run, start)) for start in (0, 0, 2, 5, 9)]
    names = []
    for count in (1, 3, 0, 2):
        await asyncio.sleep(0)
        more = [f"e{len(names) + i}" for i in range(count)]
        run.record(encode_events([{"type": name} for name in more]))
        names += more
    late = asyncio.create_task(collect(run, 1))
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in (*followers, late))
    run.done.set_result({})
    run.record()
    starts = (0, 0, 2, 5, 9)
    assert [await task for task in followers] == [names[start:] for start in starts]
    assert await late == names[1:] and await collect(run, 4) == names[4:]


async def test_a_body_is_shown_once_its_events_are_recorded() -> None:
    """So that nobody sees the end of a response that is not stored yet."""
    run = make_run()
    run.writer.response = {"id": "resp_1", "status": "completed"}
    assert run.visible["status"] == "queued" and run.body["status"] == "completed"
    run.record()
    assert run.visible == run.body


def test_a_lookup_finds_the_owners_objects_of_its_kind() -> None:
    responses = make_responses()
    store(responses, "ann", "response", "resp_1", "a")
    store(responses, "ann", "conversation", "conv_1", "b", "c")
    ann, ben = responses.make_lookup("ann"), responses.make_lookup("ben")
    assert ann.history("resp_1") == ({"id": "a"},) and ann.conversation("conv_1") == (
        {"id": "b"},
        {"id": "c"},
    )
    assert ann.history("conv_1") is ann.conversation("resp_1") is ann.history("resp_2") is None
    assert ann.item("b") == {"id": "b"}
    assert ben.history("resp_1") is ben.conversation("conv_1") is ben.item("b") is None
    assert responses.find_stored("ann", "conv_1", "conversation").id == "conv_1"
    for owner, name, kind in (("ann", "conv_1", "response"), ("ben", "conv_1", "conversation")):
        with pytest.raises(NotFound):
            responses.find_stored(owner, name, kind)


async def test_a_running_response_is_found_by_its_owner() -> None:
    responses, run = make_responses(), make_run("ann")
    responses.running["resp_1"] = run
    assert responses.find("ann", "resp_1") is run
    with pytest.raises(NotFound):
        responses.find("ben", "resp_1")


def test_a_conversation_is_held_by_one_at_a_time() -> None:
    """By its owner and id; what fails leaves nothing held."""
    responses = make_responses()
    with responses.lock_conversation("ann", "conv_1"):
        with pytest.raises(RequestError) as caught, responses.lock_conversation("ann", "conv_1"):
            raise AssertionError
        assert (caught.value.code, caught.value.param) == ("conversation_locked", "conversation")
        with responses.lock_conversation("ann", "conv_2"), responses.lock_conversation("ben", "conv_1"):
            pass
        with responses.lock_conversation("ann", None), responses.lock_conversation("ann", None):
            pass
        with pytest.raises(RequestError), responses.lock_conversation("ann", "conv_1"):
            raise AssertionError
    with pytest.raises(ZeroDivisionError), responses.lock_conversation("ann", "conv_1"):
        raise ZeroDivisionError
    with responses.lock_conversation("ann", "conv_1"):
        pass


def test_a_conversation_with_an_empty_name_locks_no_other_request() -> None:
    responses = make_responses()
    with responses.lock_conversation("ann", ""), responses.lock_conversation("ann", None):
        pass


async def test_a_conversation_that_became_too_large_is_gone() -> None:
    """Rather than that a later response begins with only a part of it."""
    responses = make_responses(store_bytes=5000)
    store(responses, "ann", "conversation", "conv_1", "a")
    body = {"id": "conv_1", "object": "conversation"}
    assert await responses.store_conversation("ann", body, [{"id": "a"}, {"id": "b"}])
    assert len(responses.make_lookup("ann").conversation("conv_1") or ()) == 2
    assert not await responses.store_conversation("ann", body, [{"id": "a", "text": "x" * 9000}])
    assert responses.make_lookup("ann").conversation("conv_1") is None
    assert responses.store.bytes == 0
