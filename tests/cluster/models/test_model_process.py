"""`mlxrun serve` with several models, whose processes really load them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from mlxrun.cluster.models import model_process
from mlxrun.cluster.models.messages import DescribeModels
from tests.helpers.batches_server import CHAT, RunningServer
from tests.helpers.command_processes import RunningCommand, read_log, run_serve, start_command, wait_until

pytestmark = pytest.mark.thorough
MODELS = "{chat: {path: embedded, memory: 600MB}, other: {path: embedded, memory: 600MB, names: [gpt]}}"
# Lines of a batch wait for so long after the last request of the model that is loaded.
IMPATIENT = "from mlxrun.cluster.models.model_pool import ModelPool; ModelPool.__init__.__defaults__ = (3.0,)"
# What a key has used stays used, however long models take to load.
STILL = (
    "from mlxrun.server.http.key_limits import KeyLimits;"
    "KeyLimits._clock = property(lambda self: lambda: 0.0, lambda self, clock: None)"
)
SMALL = (f"models={MODELS}", "scheduler.memory_limit=1GB", "engine.load_check=false")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCommand]:
    """Two models that do not fit together."""
    folder = tmp_path_factory.mktemp("models")
    disk = ("cache.backend=disk", f"cache.disk_path={folder / 'cache'}")
    with run_serve(folder, *SMALL, *disk, before=IMPATIENT) as running:
        yield running


def fetch(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.loads(reply.read())


def read_models(server: RunningCommand) -> dict[str, Any]:
    return {each["model"]: each for each in fetch(server.url + "/v1/status")["models"]}


def make_body(model: str, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"What is {number} + 3?"}],
        "temperature": 0,
        "max_tokens": 12,
    }


def list_children(server: RunningCommand) -> list[int]:
    """The processes of models that the server has started."""
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def ask(body: dict[str, Any]) -> str:
            async with http.post(url + "/v1/chat/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                return str((await reply.json())["choices"][0]["message"]["content"])

        return list(await asyncio.gather(*map(ask, bodies)))


def test_mixed_requests_over_two_models_load_each_once(server: RunningCommand) -> None:
    """30 requests, 0 errors; each answer is that of the model alone."""
    bodies = [make_body(("chat", "other", "gpt")[number % 3], number) for number in range(30)]
    answers = asyncio.run(ask_all(server.url, bodies))
    loads = [each["loads"] for each in read_models(server).values()]
    assert loads == [1, 1]
    (alone,) = asyncio.run(ask_all(server.url, [make_body("chat", 0)]))
    assert answers[0] == alone and all(answers)


def test_the_prefix_cache_on_disk_survives_the_swap(server: RunningCommand) -> None:
    text = "A story. " * 120
    body = {"model": "chat", "prompt": text, "max_tokens": 1, "temperature": 0}
    first = fetch(server.url + "/v1/completions", body)
    fetch(server.url + "/v1/completions", {**body, "model": "other", "prompt": "Hello"})
    again = fetch(server.url + "/v1/completions", body)
    assert again["choices"] == first["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > again["usage"]["prompt_tokens"] // 2
    assert read_models(server)["chat"]["loads"] >= 2


def test_a_server_whose_models_are_unloaded_is_small(server: RunningCommand) -> None:
    """The front imports no MLX, and no process of a model is left."""
    for name in read_models(server):
        fetch(server.url + "/v1/models/unload", {"model": name})
    wait_until(lambda: not list_children(server))
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    resident = 1000 * int(status.partition("VmRSS:")[2].split()[0])
    assert 10_000_000 < resident < 400_000_000


def test_stored_responses_survive_the_swap(server: RunningCommand) -> None:
    first = fetch(server.url + "/v1/responses", {"model": "chat", "input": "My name is Kim."})
    fetch(server.url + "/v1/models/unload", {"model": "chat"})
    kept = fetch(f"{server.url}/v1/responses/{first['id']}")
    assert kept["output"] == first["output"] and kept["model"] == "chat"
    more = {"model": "chat", "input": "What is my name?", "previous_response_id": first["id"]}
    assert fetch(server.url + "/v1/responses", more)["previous_response_id"] == first["id"]


def test_lines_of_a_batch_reach_their_models(server: RunningCommand) -> None:
    """Two models that do not fit together; each answer is that of a request with the seed of the line."""
    names = ("chat", "other")
    lines = [
        {"custom_id": f"{at}", "method": "POST", "url": CHAT, "body": make_body(names[at % 2], at)}
        for at in range(8)
    ]
    before = [each["loads"] for each in read_models(server).values()]
    records = asyncio.run(run_batch(server.url, lines))
    assert [record["response"]["body"]["model"] for record in records] == [*names * 4]
    loads = [each["loads"] for each in read_models(server).values()]
    assert sum(loads) - sum(before) <= 2
    alone = asyncio.run(ask_all(server.url, [line["body"] for line in lines]))
    assert [record["response"]["body"]["choices"][0]["message"]["content"] for record in records] == alone


async def run_batch(url: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of a batch, in the order of its lines."""
    async with aiohttp.ClientSession(url) as http:
        site = RunningServer(url, http, cast(Any, None), cast(Any, None), cast(Any, None))
        made = await site.create(await site.upload(lines))
        done = await site.wait_until_ended(made["id"])
        assert done["status"] == "completed" and done["request_counts"]["failed"] == 0, done
        records = await site.records(done["output_file_id"])
    return sorted(records, key=lambda record: int(record["custom_id"]))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the children of a process")
def test_a_killed_process_is_replaced(server: RunningCommand) -> None:
    fetch(server.url + "/v1/models/load", {"model": "chat"})
    for pid in list_children(server):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: read_models(server)["chat"]["state"] == "unloaded")
    assert "signal 9" in read_models(server)["chat"]["error"]
    wait_until(lambda: _try(server))


def _try(server: RunningCommand) -> bool:
    try:
        return bool(asyncio.run(ask_all(server.url, [make_body("chat", 1)])))
    except AssertionError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the children of a process")
async def test_an_interrupt_waits_for_no_look_at_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as a hub or a file system is silent."""
    monkeypatch.setattr(model_process, "PROGRAM", ("sleep", "60"))
    monkeypatch.setattr(model_process, "ENDING", 60.0)
    looking = asyncio.create_task(model_process.inspect_models(DescribeModels([])))
    await asyncio.sleep(0.1)
    looking.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await looking


def test_no_process_outlives_the_front(tmp_path: Path) -> None:
    """Killed, or stopped in the middle of a load."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        folder = tmp_path / number.name
        folder.mkdir()
        with run_serve(folder, *SMALL) as server:
            body = json.dumps({"model": "chat"}).encode()
            asyncio.run(_begin_load(server.url, body))
            wait_until(lambda server=server: bool(list_children(server)))  # type: ignore[misc]
            (child,) = list_children(server)
            server.process.send_signal(number)
            server.process.wait(60)
        wait_until(lambda child=child: not Path(f"/proc/{child}").exists())  # type: ignore[misc]


async def _begin_load(url: str, body: bytes) -> None:
    """Ask for a load, and leave."""
    async with aiohttp.ClientSession() as http:
        request = http.post(url + "/v1/models/load", data=body, headers={"Content-Type": "application/json"})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, 1.0)


def test_models_that_cannot_have_their_memory_are_refused_at_start(tmp_path: Path) -> None:
    sets = [text for each in SMALL for text in ("--set", each)]
    too_much = ["--set", "models.other.memory=2GB"]
    process = start_command(tmp_path, "serve", "--port", "0", *sets, *too_much)
    assert process.wait(240) == 2
    assert "models.other.memory: its memory is 2GB, more than scheduler.memory_limit, 1GB" in read_log(
        tmp_path
    )


def test_a_model_gets_more_than_its_weights(tmp_path: Path) -> None:
    process = start_command(tmp_path, "serve", "--set", "models={a: {path: embedded, memory: 1MB}}")
    assert process.wait(240) == 2
    assert "models.a.memory: 1.0 MB are less than its weights" in read_log(tmp_path)


def test_a_stop_ends_streams_with_an_error(tmp_path: Path) -> None:
    """Not with a broken connection."""
    with run_serve(tmp_path, *SMALL, "server.drain_timeout=0.5") as server:
        asyncio.run(ask_all(server.url, [make_body("chat", 1)]))
        body = {**make_body("chat", 2), "stream": True, "max_tokens": 3000, "min_tokens": 3000}
        text = asyncio.run(_stop_within(server, body))
    assert "shutting_down" in text and "chat: may use up to " in read_log(tmp_path)


def test_a_signal_changes_the_keys_of_loaded_models(tmp_path: Path) -> None:
    """And their limits, which hold over all."""
    old, new, key = "sesame-old-0123456789", "sesame-new-0123456789", tmp_path / "key"
    key.write_text(old)
    limited = f"server.api_keys={{me: {{key: '${{file:{key}}}', requests_per_minute: 2}}}}"
    with run_serve(tmp_path, *SMALL, limited, before=STILL) as server:

        def ask(secret: str, model: str) -> int:
            request = urllib.request.Request(
                server.url + "/v1/chat/completions",
                json.dumps(make_body(model, 1)).encode(),
                {"Content-Type": "application/json", "x-api-key": secret},
            )
            try:
                with urllib.request.urlopen(request, timeout=240) as reply:
                    return int(reply.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert (ask(old, "chat"), ask(new, "chat")) == (200, 401)
        key.write_text(new)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "(changed: me)" in read_log(tmp_path), lambda: read_log(tmp_path))
        assert (ask(old, "chat"), ask(new, "other"), ask(new, "chat")) == (401, 200, 429)


async def _stop_within(server: RunningCommand, body: dict[str, Any]) -> str:
    """Stop the server once the stream has begun, and return the rest of it."""
    url = server.url + "/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        await reply.content.readline()
        server.process.send_signal(signal.SIGTERM)
        return (await reply.read()).decode()


def test_a_model_with_a_wrong_folder_is_refused_at_start(tmp_path: Path) -> None:
    process = start_command(tmp_path, "serve", "--set", "models.other=./nowhere")
    assert process.wait(240) == 2
    assert "models.other.path: " in read_log(tmp_path) and "nowhere" in read_log(tmp_path)
