"""Stored responses and conversations under many clients at once, which continue, retrieve, cancel, delete and
abandon each other's, in a store that is too small for all: what is answered is what the whole history gives,
keys see their own only, and in the end nothing is left. Without a file a restart forgets all of them, and
says so.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.request import Request
from mlxrun.server.responses.response_runs import RESPONSES
from mlxrun.server.responses.response_store import ResponseStore, StoredObject
from tests.helpers.server_fakes import Act, Serving, make_chat_body, run_server, server_config
from tests.helpers.storm_counts import count, make_rng
from tests.robustness.test_server_fuzz import nothing_left
from tests.robustness.test_server_fuzz_bodies import CHAT
from tests.robustness.test_server_fuzz_bodies import RESPONSES as URL

KEYS = {"ann": "sk-ann", "ben": "sk-ben"}
MOST, MOST_BYTES = 30, 200_000
CONFIG = server_config(store_responses=MOST, store_bytes=MOST_BYTES, api_keys=KEYS)
LANES = 16
WITHIN = 60  # seconds: a hang, on whatever machine
REFUSED = (400, 404)  # what is running, locked, deleted or evicted


def write_digest(request: Request) -> Iterable[Act]:
    """An answer that tells what the prompt was, in some tokens with pauses."""
    text = f"{zlib.crc32(repr(request.prompt).encode()):08x}"
    for at in range(0, len(text), 2):
        yield text[at : at + 2]
        yield lambda: asyncio.sleep(0)


@dataclass
class Known:
    """A response or a conversation that some client was told of. `turns`: what was said up to its end, None
    where that depends on who came first."""

    id: str
    key: str
    turns: list[tuple[str, str]] | None = None


@dataclass
class Storm:
    """What clients of two keys do at once; the same for a seed."""

    serving: Serving
    rng: random.Random
    responses: list[Known] = field(default_factory=list)
    conversations: list[Known] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)

    async def run(self, number: int) -> None:
        acts = (self.begin, self.go_on, self.go_on, self.retrieve, self.retrieve, self.delete, self.cancel)
        acts += (self.run_in_background, self.vanish, self.make_conversation, self.talk, self.talk, self.add)
        left = iter([self.rng.choice(acts) for _ in range(number)])

        async def lane() -> None:
            for act in left:
                async with asyncio.timeout(WITHIN):
                    await act()
                self.check_limits()
                count("calls about stored responses")

        async with asyncio.TaskGroup() as group:
            for _ in range(LANES):
                group.create_task(lane())

    async def send(self, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
        reply = await self.serving.request(method, path, body, x_api_key=KEYS[key])
        assert reply.status in (200, *REFUSED), (reply.status, reply.body)
        self.found[f"{method} {reply.status}"] += 1
        return (
            reply.status,
            reply.json if reply.status != 200 or b"data: " not in reply.body else reply.events,
        )

    def check_limits(self) -> None:
        store = self.serving.app[RESPONSES].store
        assert len(store) <= MOST and store.bytes <= MOST_BYTES

    def choose(self, known: list[Known]) -> Known:
        """One of the latest, most of which are still stored."""
        return self.rng.choice(known[-40:]) if known else Known("resp_0", "ann")

    def make_input(self) -> str:
        return " ".join(self.rng.choice(("red", "boat", "far")) for _ in range(self.rng.choice((1, 3, 200))))

    async def begin(self) -> None:
        await self._answer(self.rng.choice(list(KEYS)), [])

    async def go_on(self) -> None:
        """Continue a response; another key's does not exist."""
        last = self.choose(self.responses)
        key = last.key if self.rng.random() < 0.8 else self.rng.choice(list(KEYS))
        status = await self._answer(key, last.turns, previous_response_id=last.id)
        assert key == last.key or status in REFUSED, "another key's response was continued"

    async def make_chains(self) -> None:
        """Some histories of three turns, while nobody else is there."""
        for key in KEYS:
            assert await self._answer(key, []) == 200
            for _ in range(2):
                last = self.responses[-1]
                assert await self._answer(key, last.turns, previous_response_id=last.id) == 200

    async def _answer(self, key: str, before: list[tuple[str, str]] | None, **more: Any) -> int:
        given, stream = self.make_input(), self.rng.random() < 0.4
        body = {"input": given, "max_output_tokens": 16, "stream": stream, **more}
        status, found = await self.send("POST", URL, key, body)
        if status != 200:
            return status
        response = found[-2][1]["response"] if stream else found
        assert response["status"] == "completed"
        text = response["output"][-1]["content"][0]["text"]
        turns = None if before is None else [*before, (given, text)]
        self.responses.append(Known(response["id"], key, turns))
        return status

    async def retrieve(self) -> None:
        known, key = self.choose(self.responses), self.rng.choice(list(KEYS))
        status, found = await self.send("GET", f"{URL}/{known.id}", key)
        assert status == 404 or (key == known.key and found["id"] == known.id)
        if status == 200 and known.turns:
            assert found["output"][-1]["content"][0]["text"] == known.turns[-1][1]
        await self.send("GET", f"{URL}/{known.id}/input_items", key)

    async def delete(self) -> None:
        kinds = ((URL, self.responses), (URL, self.responses), ("/v1/conversations", self.conversations))
        path, known = self.rng.choice(kinds)
        one, key = self.choose(known), self.rng.choice(list(KEYS))
        status, _ = await self.send("DELETE", f"{path}/{one.id}", key)
        assert status in REFUSED or key == one.key

    async def run_in_background(self) -> None:
        key, body = self.rng.choice(list(KEYS)), {"input": self.make_input(), "background": True}
        status, found = await self.send("POST", URL, key, {**body, "max_output_tokens": 16})
        if status == 200:
            self.responses.append(Known(found["id"], key))

    async def cancel(self) -> None:
        known = self.choose(self.responses)
        await self.send("POST", f"{URL}/{known.id}/cancel", known.key, {})

    async def vanish(self) -> None:
        """A client that goes on with a response or a conversation, and is gone before the answer."""
        known = self.choose([*self.responses[-5:], *self.conversations[-5:]])
        kind = "conversation" if known.id.startswith("conv") else "previous_response_id"
        body = {"input": self.make_input(), "stream": self.rng.random() < 0.5, kind: known.id}
        received = asyncio.create_task(self.serving.post(URL, body, x_api_key=KEYS[known.key]))
        await asyncio.sleep(self.rng.random() * 0.01)
        received.cancel()
        with suppress(asyncio.CancelledError):
            await received

    async def make_conversation(self) -> None:
        key = self.rng.choice(list(KEYS))
        status, found = await self.send("POST", "/v1/conversations", key, {"items": []})
        assert status == 200
        self.conversations.append(Known(found["id"], key))

    async def talk(self) -> None:
        one = self.choose(self.conversations[-6:])
        await self._answer(one.key, None, conversation=one.id)

    async def add(self) -> None:
        one, item = self.choose(self.conversations[-6:]), {"role": "user", "content": self.make_input()}
        await self.send("POST", f"/v1/conversations/{one.id}/items", one.key, {"items": [item]})
        await self.send("GET", f"/v1/conversations/{one.id}/items", one.key)

    async def check_answers(self) -> None:
        """Each last answer is that to the whole history in one body."""
        by_length = sorted(self.responses, key=lambda known: len(known.turns or ()), reverse=True)
        for known in by_length[:40]:
            if known.turns:
                items = [self._write_turn(*turn) for turn in known.turns]
                body = {"input": sum(items, [])[:-1], "store": False, "max_output_tokens": 16}
                status, found = await self.send("POST", URL, known.key, body)
                assert status == 200
                assert found["output"][-1]["content"][0]["text"] == known.turns[-1][1], known
                count("answers to stored histories that were compared")

    def _write_turn(self, given: str, text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": given}, {"role": "assistant", "content": text}]

    async def check_empties(self) -> None:
        """Once all are deleted, nothing is left of them."""
        for path, known in ((URL, self.responses), ("/v1/conversations", self.conversations)):
            for one in known:
                await self.send("DELETE", f"{path}/{one.id}", one.key)
        store = self.serving.app[RESPONSES].store
        for name in tuple(store._stored):  # of clients that were gone before they were told
            store.delete(store._stored[name].owner, name)
        assert (len(store), store.bytes, +store._references, store._index) == (0, 0, Counter(), {})
        assert self.serving.app[RESPONSES]._locked == set()


async def storm(rng: random.Random, number: int, path: Path | None = None) -> Storm:
    async with run_server(CONFIG, script=write_digest, responses_path=path) as s:
        s.headers["x-api-key"] = "sk-ann"
        found = Storm(s, rng)
        await found.make_chains()
        await found.run(number)
        await found.check_answers()
        await nothing_left(s)
        await found.check_empties()
        return found


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 400), *(pytest.param(seed, 2000, marks=pytest.mark.sweep) for seed in range(1, 9))],
)
async def test_stored_responses_under_load(seed: int, number: int, night: int) -> None:
    done = await storm(make_rng(seed, night), number)
    assert done.responses and done.conversations
    assert done.found["GET 404"] and done.found["DELETE 200"] and done.found["POST 404"]


async def test_a_mixed_up_history_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the first item of a history is missing."""
    get = ResponseStore.get

    def get_less(store: ResponseStore, owner: str, name: str) -> StoredObject | None:
        found = get(store, owner, name)
        if found is None or len(found.items) < 2 or found.body["object"] != "response":
            return found
        return StoredObject(found.owner, found.body, found.items[1:], 0, found.item_bytes[1:], found.events)

    monkeypatch.setattr(ResponseStore, "get", get_less)
    with pytest.raises(AssertionError, match="turns="):
        await storm(random.Random(0), 400)


async def test_a_restart_without_a_file_forgets_all_and_says_so() -> None:
    """As documented: a client that goes on is told that its response does not exist, whatever it asks."""
    body = make_chat_body()["messages"]
    async with run_server(script=write_digest) as s:
        made = (await s.post(URL, {"input": body, "max_output_tokens": 16})).json["id"]
        talk = (await s.post("/v1/conversations", {})).json["id"]
        running = asyncio.create_task(s.post(URL, {"input": body, "previous_response_id": made}))
        assert (await running).status == 200
    async with run_server(script=write_digest) as s:
        for method, path, given in (
            ("GET", f"{URL}/{made}", None),
            ("DELETE", f"{URL}/{made}", None),
            ("GET", f"{URL}/{made}/input_items", None),
            ("POST", f"{URL}/{made}/cancel", {}),
            ("POST", URL, {"input": body, "previous_response_id": made}),
            ("POST", URL, {"input": body, "conversation": talk}),
            ("GET", f"/v1/conversations/{talk}", None),
            ("POST", f"/v1/conversations/{talk}/items", {"items": [{"role": "user", "content": "hello"}]}),
        ):
            reply = await s.request(method, path, given)
            assert reply.status in REFUSED, (method, path)
            text = reply.json["error"]["message"]
            assert "does not exist" in text or "there is no stored" in text, reply.body
        assert (await s.post(CHAT, make_chat_body())).status == 200
        await nothing_left(s)
