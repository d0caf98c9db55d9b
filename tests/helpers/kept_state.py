"""The state of a stopped server: writes it, and checks that a server of today has kept everything.

`kept_state/` has what earlier versions wrote. `python -m tests.helpers.kept_state VERSION` adds what today's
writes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import aiohttp

from tests.helpers.batches_server import CHAT, RunningServer
from tests.helpers.command_processes import RunningCommand, run_serve, wait_until

KEPT = Path(__file__).parent / "kept_state"
SETTINGS = ("engine.load_check=false",)
UNFINISHED = 3  # lines, of which the first is done


def make_line(number: int, tokens: int) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": f"What is {number} + 3?"}],
        "temperature": 0,
        "max_tokens": tokens,
        "min_tokens": tokens,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def make_site(server: RunningCommand, http: aiohttp.ClientSession) -> RunningServer:
    return RunningServer(server.url, http, cast(Any, None), cast(Any, None), cast(Any, None))


def write_state(folder: Path) -> dict[str, Any]:
    """Write the state of a server into `folder`/data, and return what a client knows of it. The server is
    stopped by SIGTERM while a batch runs."""
    with run_serve(folder, *SETTINGS, "server.drain_timeout=1") as server:
        known = asyncio.run(_use(server))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.process.poll() is not None)
        assert server.process.returncode == 0
    (done,) = (folder / "data").glob(f"batches/{known['unfinished']}/job/*.out.jsonl")
    return {**known, "done": json.loads(done.read_text())}


async def _use(server: RunningCommand) -> dict[str, Any]:
    async with aiohttp.ClientSession(server.url) as http:
        site = make_site(server, http)
        talk = await site.send("POST", "/v1/conversations", json={"metadata": {"topic": "sums"}})
        body = {"input": "What is 2 + 3?", "temperature": 0, "max_output_tokens": 8}
        first = await site.send("POST", "/v1/responses", json={**body, "conversation": talk["id"]})
        done = await site.create(
            await site.upload([make_line(0, 4), make_line(1, 4)]), metadata={"of": "old"}
        )
        done = await site.wait_until_ended(done["id"])
        lines = [make_line(0, 4), *(make_line(number, 800) for number in range(1, UNFINISHED))]
        begun = await site.create(await site.upload(lines))
        async with asyncio.timeout(60):
            while not (await site.send("GET", f"/v1/batches/{begun['id']}"))["request_counts"]["completed"]:
                await asyncio.sleep(0.01)
        return {
            "conversation": talk["id"],
            "items": (await site.send("GET", f"/v1/conversations/{talk['id']}/items"))["data"],
            "response": first,
            "batch": done,
            "records": await site.records(done["output_file_id"]),
            "unfinished": begun["id"],
            "files": (await site.send("GET", "/v1/files"))["data"],
        }


def check_state(folder: Path, known: dict[str, Any]) -> None:
    """Open `folder`/data by a server of today. AssertionError if it lacks anything that a client knows."""
    path = folder / "data/batches" / known["unfinished"] / "batch.json"
    batch = json.loads(path.read_text())
    path.write_text(json.dumps({**batch, "expires_at": int(time.time()) + 3600}))  # it may be years old
    with run_serve(folder, *SETTINGS, "server.store_days=36500") as server:
        asyncio.run(_check(server, known))


async def _check(server: RunningCommand, known: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        site = make_site(server, http)
        files = {each["id"]: each for each in (await site.send("GET", "/v1/files"))["data"]}
        assert [files.get(each["id"]) for each in known["files"]] == known["files"]
        assert await site.send("GET", f"/v1/batches/{known['batch']['id']}") == known["batch"]
        assert await site.records(known["batch"]["output_file_id"]) == known["records"]
        first = known["response"]
        assert await site.send("GET", f"/v1/responses/{first['id']}") == first
        items = await site.send("GET", f"/v1/conversations/{known['conversation']}/items")
        assert items["data"] == known["items"]
        more = {"input": "And 4 + 5?", "previous_response_id": first["id"], "max_output_tokens": 8}
        assert (await site.send("POST", "/v1/responses", json=more))["previous_response_id"] == first["id"]
        ended = await site.wait_until_ended(known["unfinished"])
        assert ended["status"] == "completed"
        assert ended["request_counts"] == {"total": UNFINISHED, "completed": UNFINISHED, "failed": 0}
        records = {each["custom_id"]: each for each in await site.records(ended["output_file_id"])}
        assert records["line-0"] == known["done"] and len(records) == UNFINISHED


def keep_state(version: str) -> None:
    """Add the state that this version writes to those that later versions must open."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = write_state(folder)
        for path in (folder / "data").rglob("manifest.json"):
            path.write_text(path.read_text().replace(name, "/srv/mlxrun"))
        shutil.copytree(folder / "data", KEPT / version / "data")
        (KEPT / version / "known.json").write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    keep_state(sys.argv[1])
