"""The HTTP side of `python -m benchmarks prompt-logprobs`: a server process, and lm-eval's own requests.

lm-eval's `local-completions` model sends each choice as a request of its own, the longest first, with the
prompt as token ids, and reads the sum of the logprobs after the context (`TemplateAPI.amodel_call`,
`LocalCompletionsAPI.parse_logprobs`). The same is done here with the same HTTP client, without lm-eval
around it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.server_process import start_server
from mlxrun.config.setting_fields import to_plain
from mlxrun.config.settings import Config

if TYPE_CHECKING:
    from aiohttp import ClientSession

Choice = tuple[tuple[int, ...], tuple[int, ...]]  # the tokens of a context and of what is scored after it
LIMIT = 3600.0  # seconds for all requests


def run_http_side(
    config: Config, choices: Sequence[Choice], folder: Path
) -> tuple[float, float | None, list[float]]:
    """Score all choices on a new server with an empty prefix cache: seconds, the server's processor time
    (None where the system does not say), and the sum of each choice's logprobs."""
    return asyncio.run(_run(config, choices, folder))


async def _run(
    config: Config, choices: Sequence[Choice], folder: Path
) -> tuple[float, float | None, list[float]]:
    import aiohttp

    path = folder / "server.yaml"
    quiet = replace(config, log=replace(config.log, level="warning"))
    path.write_text(json.dumps(to_plain(quiet)), encoding="utf-8")  # JSON is YAML
    concurrency = 2 * config.scheduler.max_running  # as docs/evals.md advises
    order = sorted(range(len(choices)), key=lambda i: _get_sort_key(choices[i]))
    slots, scores = asyncio.Semaphore(concurrency), [0.0] * len(choices)
    async with start_server(path, folder) as server:
        connector, limit = aiohttp.TCPConnector(limit=concurrency), aiohttp.ClientTimeout(total=LIMIT)
        async with aiohttp.ClientSession(server.url, connector=connector, timeout=limit) as http:

            async def score(number: int) -> None:
                async with slots:
                    scores[number] = await _score(http, choices[number])

            before, start = server.read_cpu_seconds(), time.perf_counter()
            await asyncio.gather(*map(score, order))
            seconds, after = time.perf_counter() - start, server.read_cpu_seconds()
    return seconds, None if before is None or after is None else after - before, scores


def _get_sort_key(choice: Choice) -> tuple[int, tuple[int, ...]]:
    tokens = choice[0] + choice[1]
    return -len(tokens), tokens


async def _score(http: ClientSession, choice: Choice) -> float:
    context, continuation = choice
    body = {
        "model": "default",
        "prompt": [[*context, *continuation]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    async with http.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
    logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return sum(logprobs[len(context) : -1])  # the last one is of the token that was generated
