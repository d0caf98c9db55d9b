"""`mlxrun serve` on a real Ray with two simulated nodes: a worker dies, and all are restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

SECONDS = 240
SUM = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
STORY = {"prompt": "Once upon a time", "max_tokens": 150, "min_tokens": 140, "temperature": 0}


@contextmanager
def serve(address: str, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with two workers, and its URL."""
    command = [sys.executable, "-m", "mlxrun", "serve", "--port", "0", "--ray", address]
    with log.open("w") as file:
        server = subprocess.Popen([*command, "--set", "workers.count=2"], stdout=file, stderr=file, text=True)
    try:
        wait_for(lambda: "ready: embedded" in log.read_text() or server.poll() is not None, log)
        yield server, log.read_text().partition("listening on ")[2].partition(";")[0]
    finally:
        server.kill()
        server.wait()


def wait_for(holds: Callable[[], Any], log: Path) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=SECONDS) as reply:
        return json.loads(reply.read())


def list_workers(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(f"{url}/v1/status")["workers"]
    return found


@pytest.mark.sweep
def test_a_server_on_two_nodes(address: str, tmp_path: Path) -> None:
    """What a killed worker had is answered by the other one; a restart fails nothing; SIGTERM ends it."""
    log = tmp_path / "serve.log"

    def have_started(*but: int) -> bool:
        workers = list_workers(url)
        return all(each["state"] == "ready" and each["process"] not in but for each in workers)

    with serve(address, log) as (server, url), ThreadPoolExecutor(8) as threads:
        wait_for(have_started, log)
        workers = list_workers(url)
        assert len(workers) == 2 and len({each["process"] for each in workers}) == 2
        first = ask(f"{url}/v1/chat/completions", SUM)["choices"][0]["message"]["content"]
        assert "5" in first
        story = ask(f"{url}/v1/completions", STORY)["choices"][0]["text"]

        asking = [threads.submit(ask, f"{url}/v1/completions", STORY | {"seed": n}) for n in range(4)]
        wait_for(lambda: any(each["running"] for each in list_workers(url)), log)
        busy = max(list_workers(url), key=lambda each: each["running"])
        os.kill(busy["process"], signal.SIGKILL)
        assert {each.result()["choices"][0]["text"] for each in asking} == {story}
        wait_for(lambda: have_started(busy["process"]), log)

        old = [each["process"] for each in list_workers(url)]
        server.send_signal(signal.SIGHUP)
        while not have_started(*old):
            answers = [threads.submit(ask, f"{url}/v1/chat/completions", SUM) for _ in range(4)]
            assert {each.result()["choices"][0]["message"]["content"] for each in answers} == {first}
        server.terminate()
        assert server.wait(SECONDS) == 0, log.read_text()
