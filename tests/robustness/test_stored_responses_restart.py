"""Stored responses and conversations over restarts and kills of the server: what a client was told of is
there and continues as if nothing had happened, and what was running has failed and says why."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.core.errors import Overloaded
from mlxrun.server.endpoints import responses
from mlxrun.server.responses.response_file import FILE_NAME, Changes, ResponseFile
from mlxrun.server.responses.response_runs import RESPONSES, Responses
from mlxrun.server.responses.response_store import ResponseStore, StoredObject
from tests.helpers.batches_server import make_processes
from tests.helpers.command_processes import PATIENCE, RunningCommand, read_log, run_serve, start_command
from tests.helpers.server_fakes import Serving, make_script, run_server, server_config
from tests.helpers.storm_counts import count, make_rng
from tests.robustness.test_stored_responses import CONFIG, storm, write_digest

URL, TALKS = "/v1/responses", "/v1/conversations"
RUNNING = ("queued", "in_progress")
KILLS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / FILE_NAME


async def say(s: Serving, text: str, **fields: Any) -> dict[str, Any]:
    reply = await s.post(URL, {"input": text, "max_output_tokens": 16, **fields})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


def read_text(response: dict[str, Any]) -> str:
    return str(response["output"][-1]["content"][0]["text"])


async def wait_until_ended(s: Serving, name: str) -> dict[str, Any]:
    while (found := (await s.get(f"{URL}/{name}")).json)["status"] in RUNNING:
        await asyncio.sleep(0.002)
    return dict(found)


async def make_everything(s: Serving) -> list[str]:
    """Stored things of every kind, and the paths by which clients see them."""
    first = await say(s, "one", metadata={"a": "b"}, instructions="Be kind.")
    second = await say(s, "two", previous_response_id=first["id"])
    gone = await say(s, "three", previous_response_id=second["id"])
    assert (await s.request("DELETE", f"{URL}/{gone['id']}")).status == 200
    talk = (await s.post(TALKS, {"items": [{"role": "user", "content": "begin \ud83d\ude00"}]})).json["id"]
    for text in ("four", "five", "six"):
        await say(s, text, conversation=talk)
    items = (await s.get(f"{TALKS}/{talk}/items?order=asc")).json["data"]
    assert (await s.request("DELETE", f"{TALKS}/{talk}/items/{items[1]['id']}")).status == 200
    assert (await s.post(f"{TALKS}/{talk}", {"metadata": {"c": "d"}})).status == 200
    behind = await say(s, "seven", background=True, previous_response_id=second["id"])
    await wait_until_ended(s, behind["id"])
    await s.settle()
    names = [response["id"] for response in (first, second, gone, behind)]
    paths = [
        f"{URL}/{name}{more}" for name in names for more in ("", "/input_items", "/input_items?order=asc")
    ]
    paths += [f"{URL}/{behind['id']}?stream=true&starting_after={at}" for at in (0, 3)]
    paths += [f"{TALKS}/{talk}", f"{TALKS}/{talk}/items?limit=2", f"{TALKS}/{talk}/items?order=asc"]
    return [*paths, f"{TALKS}/{talk}/items/{items[2]['id']}"]


async def test_everything_is_the_same_after_a_restart(path: Path) -> None:
    async with run_server(script=write_digest, responses_path=path) as s:
        paths = await make_everything(s)
        before = [await s.get(each) for each in paths]
    assert Path(f"{path}-wal").exists() is False, "the end of the server leaves one file"
    async with run_server(script=write_digest, responses_path=path) as s:
        for each, reply in zip(paths, before, strict=True):
            again = await s.get(each)
            assert (again.status, again.body) == (reply.status, reply.body), each
    assert {reply.status for reply in before} == {200, 404}


async def talk_over_a_restart(path: Path | None) -> list[str]:
    """What is answered in turns, with a restart in between if there is a path: by response and by
    conversation. An answer is a digest of its whole prompt."""
    async with run_server(script=write_digest, responses_path=path) as s:
        first = await say(s, "one", instructions="Be kind.")
        second = await say(s, "two", previous_response_id=first["id"])
        talk = (await s.post(TALKS, {})).json["id"]
        third = await say(s, "three", conversation=talk)
        texts = [read_text(each) for each in (first, second, third)]
        if path is None:
            return texts + await _go_on(s, second["id"], talk)
    async with run_server(script=write_digest, responses_path=path) as s:
        return texts + await _go_on(s, second["id"], talk)


async def _go_on(s: Serving, last: str, talk: str) -> list[str]:
    fourth = await say(s, "four", previous_response_id=last)
    fifth = await say(s, "five", conversation=talk)
    sixth = await say(s, "six", previous_response_id=fourth["id"])
    return [read_text(each) for each in (fourth, fifth, sixth)]


async def test_an_answer_after_a_restart_is_that_without_one(path: Path) -> None:
    assert await talk_over_a_restart(path) == await talk_over_a_restart(None)


async def test_a_history_that_lost_an_item_would_be_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the first item of each object is not read again."""
    restore = StoredObject.restore

    def lose(document: dict[str, Any], *given: Any) -> StoredObject:
        return restore({**document, "numbers": document["numbers"][1:]}, *given)

    wanted = await talk_over_a_restart(None)
    monkeypatch.setattr(StoredObject, "restore", lose)
    found = await talk_over_a_restart(path)
    assert found[:3] == wanted[:3] and found[3] != wanted[3] and found[4] != wanted[4]


async def test_each_key_has_its_own_after_a_restart(path: Path) -> None:
    config = server_config(api_keys={"ann": "sk-ann", "ben": "sk-ben"})
    async with run_server(config, responses_path=path) as s:
        s.headers["x-api-key"] = "sk-ann"
        made = (await say(s, "one"))["id"]
    async with run_server(config, responses_path=path) as s:
        assert (await s.get(f"{URL}/{made}", x_api_key="sk-ann")).status == 200
        assert (await s.get(f"{URL}/{made}", x_api_key="sk-ben")).status == 404


async def test_a_response_of_unknown_length_of_life_expires(path: Path) -> None:
    """With a shorter lifetime than when it was stored."""
    async with run_server(responses_path=path) as s:
        made = (await say(s, "one"))["id"]
    async with run_server(server_config(store_days=1e-9), responses_path=path) as s:
        assert (await s.get(f"{URL}/{made}")).status == 404
    async with run_server(responses_path=path) as s:
        assert (await s.get(f"{URL}/{made}")).status == 404


# What runs when the process ends.


@pytest.fixture
async def cut_off(path: Path) -> AsyncIterator[tuple[Path, list[dict[str, Any]]]]:
    """The file as a kill leaves it while two responses run in the background, one of a conversation; and
    these responses, as they were created."""
    never = asyncio.Event()
    aside = path.parent.parent / "killed"
    async with run_server(script=make_script("Hel", never.wait), responses_path=path) as s:
        first = {"input": "hi", "background": True, "metadata": {"a": "b"}}
        talk = (await s.post(TALKS, {})).json["id"]
        made = [(await s.post(URL, body)).json for body in (first, {**first, "conversation": talk})]
        while (await s.get(f"{URL}/{made[1]['id']}")).json["status"] == "queued":
            await asyncio.sleep(0.002)
        shutil.copytree(path.parent, aside)
    yield aside / path.name, made


async def test_a_response_that_was_running_has_failed(cut_off: tuple[Path, list[dict[str, Any]]]) -> None:
    """It says why, can be followed, continued and deleted as others, and its conversation is free."""
    path, (made, talking) = cut_off
    async with run_server(script=write_digest, responses_path=path) as s:
        found = (await s.get(f"{URL}/{made['id']}")).json
        error = {"code": "server_error", "message": "the server ended while the response was running"}
        assert found == {**made, "status": "failed", "error": error}
        (item,) = (await s.get(f"{URL}/{made['id']}/input_items")).json["data"]
        assert item["content"][0]["text"] == "hi"
        for after in (0, 57):
            reply = await s.get(f"{URL}/{made['id']}?stream=true&starting_after={after}")
            (name, event), end = reply.events
            assert (name, event["sequence_number"], event["response"]) == (
                "response.failed",
                after + 1,
                found,
            )
            assert end == (None, "[DONE]")
        reply = await s.post(f"{URL}/{made['id']}/cancel", {})
        assert reply.status == 400 and "is failed and cannot be cancelled" in reply.json["error"]["message"]
        await say(s, "and?", previous_response_id=made["id"])
        await say(s, "and?", conversation=talking["conversation"]["id"])
        assert (await s.request("DELETE", f"{URL}/{made['id']}")).status == 200
    async with run_server(responses_path=path) as s:
        assert (await s.get(f"{URL}/{made['id']}")).status == 404
        assert (await s.get(f"{URL}/{talking['id']}")).json["status"] == "failed"


async def test_the_servers_end_leaves_it_failed(path: Path) -> None:
    never = asyncio.Event()
    async with run_server(script=make_script("a", never.wait), responses_path=path) as s:
        made = (await s.post(URL, {"input": "hi", "background": True})).json["id"]
    async with run_server(responses_path=path) as s:
        found = (await s.get(f"{URL}/{made}")).json
        assert found["status"] == "failed" and "the server ended" in found["error"]["message"]


async def test_one_that_its_client_was_not_told_of_is_not_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine refuses it: the error is its client's, and nothing stays."""
    monkeypatch.setattr(responses, "START_SECONDS", 30.0)
    async with run_server(script=make_script(Overloaded("full")), responses_path=path) as s:
        assert (await s.post(URL, {"input": "hi", "background": True})).status == 429
        assert len(s.app[RESPONSES].store) == 0
    async with run_server(responses_path=path) as s:
        assert len(s.app[RESPONSES].store) == 0


async def test_a_response_that_would_seem_to_run_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: nothing is stored before a response in the background has ended."""

    async def skip(*_: Any) -> None:
        pass

    monkeypatch.setattr(Responses, "keep_failed", skip)
    never = asyncio.Event()
    async with run_server(script=make_script("a", never.wait), responses_path=path) as s:
        made = (await s.post(URL, {"input": "hi", "background": True})).json["id"]
    async with run_server(responses_path=path) as s:
        assert (await s.get(f"{URL}/{made}")).status == 404


# Many clients, and kills.


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 300), *(pytest.param(seed, 2000, marks=pytest.mark.sweep) for seed in range(1, 5))],
)
async def test_a_storm_leaves_nothing_behind(path: Path, seed: int, number: int, night: int) -> None:
    """Many clients at once, with a file: answers are right, and once all is deleted the file has nothing."""
    done = await storm(make_rng(seed, night), number, path)
    assert done.responses and done.conversations
    async with run_server(CONFIG, responses_path=path) as s:
        assert len(s.app[RESPONSES].store) == 0
    assert path.stat().st_size <= 5 * 4096


async def test_a_response_and_its_conversation_are_written_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else writes meanwhile: a kill leaves both or none."""
    written: list[Changes] = []
    write = ResponseFile.write
    monkeypatch.setattr(ResponseFile, "write", lambda file, each: (written.append(each), write(file, each)))
    async with run_server(responses_path=path) as s:

        async def write_always() -> None:
            while True:
                await s.app[RESPONSES].store.flush()

        writing = asyncio.create_task(write_always())
        talk = (await s.post(TALKS, {})).json["id"]
        made = [(await say(s, "one", conversation=talk))["id"] for _ in range(10)]
        writing.cancel()
    for name in made:
        (changes,) = [each for each in written if name in each.objects]
        assert talk in changes.objects


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    with make_processes() as context:
        yield context


def serve(root: Path) -> None:
    """A server in a process of its own; `root` gets its URL."""

    async def run() -> None:
        async with run_server(server_config(), script=write_digest, responses_path=root / FILE_NAME) as s:
            (root / "url.tmp").write_text(s.url)
            (root / "url.tmp").rename(root / "url")
            await asyncio.Event().wait()

    asyncio.run(run())


class Client:
    """What clients were told of, over all servers: each response, and what each conversation has."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.answered: dict[str, dict[str, Any]] = {}
        self.deleted: set[str] = set()
        self.talks: dict[str, int] = {}  # the least number of items

    async def use(self, session: aiohttp.ClientSession) -> None:
        """Create, continue and delete until the server is gone."""
        with suppress(aiohttp.ClientError):
            while True:
                known = [name for name, made in self.answered.items() if made["status"] not in RUNNING]
                choice = self.rng.random()
                if choice < 0.1 and known:
                    name = self.rng.choice(known)
                    del self.answered[name]
                    if (await self._send(session, "DELETE", f"{URL}/{name}"))["deleted"]:
                        self.deleted.add(name)
                    continue
                body: dict[str, Any] = {"input": f"word {choice}", "max_output_tokens": 8}
                if choice < 0.3 and known:
                    body["previous_response_id"] = self.rng.choice(known)
                elif choice < 0.5:
                    body["background"] = True
                elif choice < 0.6:
                    talk = (await self._send(session, "POST", TALKS, {}))["id"]
                    self.talks[talk] = 0
                    await self._send(session, "POST", URL, {**body, "conversation": talk})
                    self.talks[talk] = 2
                    continue
                made = await self._send(session, "POST", URL, body)
                if made is not None:
                    self.answered[made["id"]] = made

    async def _send(self, session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
        """The answer; None if another client has just deleted what is continued."""
        async with session.request(method, path, json=body) as response:
            found = json.loads(await response.read())
            if response.status == 400 and found["error"]["code"] == "previous_response_not_found":
                return None
            assert response.status == 200, found
            return found

    async def check(self, session: aiohttp.ClientSession) -> None:
        """All that a client was told of is there, and nothing runs."""
        for name, made in self.answered.items():
            found = await self._send(session, "GET", f"{URL}/{name}")
            assert found["id"] == name and found["status"] not in RUNNING
            assert found == made or made["status"] in RUNNING
            self.answered[name] = found
        for name in self.deleted:
            async with session.get(f"{URL}/{name}") as response:
                assert response.status == 404
        for name, number in self.talks.items():
            assert len((await self._send(session, "GET", f"{TALKS}/{name}/items"))["data"]) >= number


async def run_and_kill(root: Path, context: ForkServerContext, client: Client, kill: bool = True) -> None:
    """One server: it has what earlier ones had, is used by several at once, and killed in the middle."""
    (root / "url").unlink(missing_ok=True)
    process = context.Process(target=serve, args=(root,))
    process.start()
    try:
        async with asyncio.timeout(60):
            while not (root / "url").exists():
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession((root / "url").read_text()) as session:
            await client.check(session)
            if kill:
                before = len(client.answered)
                using = [asyncio.create_task(client.use(session)) for _ in range(4)]
                async with asyncio.timeout(60):
                    while len(client.answered) < before + client.rng.randrange(5, 30):
                        await asyncio.sleep(client.rng.random() * 0.01)
                os.kill(process.pid or 0, signal.SIGKILL)
                count("kills of servers with stored responses")
                await asyncio.gather(*using)
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 9))])
async def test_kills_lose_nothing(
    tmp_path: Path, processes: ForkServerContext, seed: int, night: int
) -> None:
    client = Client(make_rng(seed, night))
    for _ in range(KILLS):
        await run_and_kill(tmp_path, processes, client)
    await run_and_kill(tmp_path, processes, client, kill=False)
    assert len(client.answered) > 4 * KILLS and client.deleted and client.talks
    assert not list(tmp_path.glob("*damaged*"))


async def test_a_write_that_nobody_waits_for_would_be_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: what is answered is in memory only; a kill then loses it."""

    async def skip(*_: Any) -> None:
        pass

    monkeypatch.setattr(ResponseStore, "flush", skip)
    aside = path.parent.parent / "killed"
    async with run_server(responses_path=path) as s:
        made = (await say(s, "one"))["id"]
        shutil.copytree(path.parent, aside)
    monkeypatch.undo()
    async with run_server(responses_path=aside / path.name) as s:
        assert (await s.get(f"{URL}/{made}")).status == 404


# The command itself, with the embedded model.


def ask(server: RunningCommand, method: str, path: str, body: Any = None) -> Any:
    """A GET or POST that succeeds."""
    data = None if body is None else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(*server.address, timeout=PATIENCE)) as connection:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read())
        assert response.status == 200, found
        return found


def go_on(server: RunningCommand, last: str | None) -> tuple[str, int]:
    """The answer to a second turn, and the tokens of its prompt."""
    body = {"input": "And 5 more?", "temperature": 0, "max_output_tokens": 40}
    found = ask(server, "POST", URL, body if last is None else {**body, "previous_response_id": last})
    return read_text(found), found["usage"]["input_tokens"]


@pytest.mark.slow
def test_a_model_answers_after_a_kill_as_before(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with run_serve(first) as server:
        body = {"input": "What is 12 + 30?", "instructions": "Be exact.", "temperature": 0}
        made = ask(server, "POST", URL, body)
        wanted = go_on(server, made["id"])
        assert go_on(server, None)[1] < wanted[1]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with run_serve(second, f"server.data_path={first / 'data'}") as server:
        assert ask(server, "GET", f"{URL}/{made['id']}") == made
        assert go_on(server, made["id"]) == wanted
    assert "responses.sqlite" not in read_log(second), "nothing was amiss"


@pytest.mark.slow
def test_a_file_of_a_newer_mlxrun_ends_the_command(tmp_path: Path) -> None:
    """With the code of a wrong config, so that a supervisor does not start it again and again."""
    path = tmp_path / FILE_NAME
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    process = start_command(tmp_path, "serve", "--port", "0", "--set", f"server.data_path={tmp_path}")
    assert process.wait(PATIENCE) == 2
    assert f"{path}: a newer mlxrun has written it" in read_log(tmp_path)
