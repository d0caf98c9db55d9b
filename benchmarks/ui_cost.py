"""Measures what the page /ui costs a server that is under load.

A server with the built-in model answers streams of requests in turns: while nobody looks (`closed`), while a
client asks for the status as TIMES open pages do (`polled`), and while a headless Chromium shows the view of
the server (`open`). Asking so often makes the cost of one page larger than the noise of a busy machine. In
`open`, the browser computes on the same machine. Each turn has the same requests.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.browser import open_browser
from benchmarks.server_process import ServerProcess, start_server
from mlxrun.cli.bench.report import make_console, make_table

POLL_SECONDS = 2.0  # as in server.js
TIMES = 50  # pages whose requests are sent
CLOSED, POLLED, OPEN = "closed", "polled", "open"
COST = "cpu_ms_per_token"
PROMPT = "Request {number}: count from one to a thousand, and write each number as a word."


async def run_ui_bench(
    streams: int, requests: int, tokens: int, turns: int, browser: str | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The report. `streams`: requests at a time; `requests`: of each turn; `tokens`: of each answer;
    `browser`: a Chromium. Without one there is no side `open`."""
    sides = (CLOSED, POLLED, OPEN) if browser else (CLOSED, POLLED)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="mlxrun-ui-cost-") as name:
        config = Path(name, "mlxrun.yaml")
        config.write_text("")
        async with start_server(config, Path(name)) as server:
            await _measure_turn(server, streams, streams, tokens)  # kernels and caches are warm
            for turn in range(turns):
                # Each side is as often the first, the second and the last.
                for side in (*sides[turn % len(sides) :], *sides[: turn % len(sides)]):
                    async with _look(side, server.url, browser or ""):
                        runs[side].append(await _measure_turn(server, streams, requests, tokens))
                    say(f"{side}: {runs[side][-1]['output_tps']:.0f} tokens/s")
    return build_report(runs, {"streams": streams, "requests": requests, "tokens": tokens, "turns": turns})


def build_report(runs: Mapping[str, list[dict[str, float]]], shape: Mapping[str, int]) -> dict[str, Any]:
    """The report of these runs. `ratios`: medians of a side's figure by that of `closed` in the same turn;
    `page_cost`: the share by which one page makes a token dearer for the server's processors."""
    sides: dict[str, Any] = {}
    for side, found in runs.items():
        sides[side] = {"runs": found, "median": _take_medians(found)}
        if side != CLOSED:
            pairs = [
                {key: run[key] / base[key] for key in run if base[key]}
                for run, base in zip(found, runs[CLOSED], strict=True)
            ]
            sides[side]["ratios"] = ratios = _take_medians(pairs)
            if COST in ratios:
                sides[side]["page_cost"] = round((ratios[COST] - 1) / (TIMES if side == POLLED else 1), 5)
    options = " ".join(f"--{name} {value}" for name, value in shape.items())
    facts = {"load": round(os.getloadavg()[0], 2), "shape": dict(shape)}
    command = f"python -m benchmarks ui-cost {options} --json FILE"
    return {"format": 1, "command": command, "model": "embedded", **facts, "sides": sides}


def _take_medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs if key in run), 5) for key in runs[0]}


async def _measure_turn(server: ServerProcess, streams: int, requests: int, tokens: int) -> dict[str, float]:
    """Send the requests; output tokens a second, and milliseconds of the server's processors for each."""
    waiting = iter(range(requests))
    cpu, start = server.read_cpu_seconds(), time.perf_counter()
    async with aiohttp.ClientSession(server.url) as http, asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(_send_requests(http, waiting, tokens))
    seconds, total = time.perf_counter() - start, requests * tokens
    found = {"output_tps": total / seconds}
    after = server.read_cpu_seconds()
    if cpu is not None and after is not None:
        found[COST] = (after - cpu) * 1000 / total
    return found


async def _send_requests(http: aiohttp.ClientSession, waiting: Any, tokens: int) -> None:
    for number in waiting:
        body = {
            "prompt": PROMPT.format(number=number),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        async with http.post("/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()


@asynccontextmanager
async def _look(side: str, url: str, browser: str) -> AsyncIterator[None]:
    """Look at the server as the side does, until the block ends."""
    if side == OPEN:
        async with open_browser(browser) as page:
            await page.open(f"{url}/ui#server")
            yield
    elif side == POLLED:
        task = asyncio.create_task(_ask_for_status(url))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    else:
        yield


async def _ask_for_status(url: str) -> None:
    async with aiohttp.ClientSession(url) as http:
        while True:
            async with http.get("/v1/status") as response:
                response.raise_for_status()
                await response.read()
            await asyncio.sleep(POLL_SECONDS / TIMES)


def print_ui_report(report: Mapping[str, Any]) -> None:
    """Print a line for each side."""
    console = make_console(None)
    titles = ("page", "tokens/s", "by closed", "server's CPU a token", "by closed", "cost of a page")
    cells = []
    for side, found in report["sides"].items():
        median, ratios = found["median"], found.get("ratios", {})
        row = [side]
        for key, unit in (("output_tps", ""), (COST, " ms")):
            row.append(f"{median[key]:.2f}{unit}" if key in median else "")
            row.append(f"{ratios[key]:.3f}" if key in ratios else "")
        cost = found.get("page_cost")
        cells.append((*row, "" if cost is None else f"{cost:.2%}"))
    console.print(make_table(titles, 1, cells, console.is_terminal))
