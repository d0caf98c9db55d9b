"""The workload `interactive` of `mlxrun bench serve`: one person at an idle server, and a long prompt.

A round measures the time to first token of a short request: alone, behind a long prompt, and as a long
prompt's client disconnects. Meanwhile /health and /v1/status are called, where the server has them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

from mlxrun.cli.bench.engine.measurement import INTERACTIVE_MEASURES, Measure
from mlxrun.cli.bench.serve.long_prompt import (
    SHORT_TOKENS,
    EndpointWatch,
    make_chat_body,
    make_failed_round,
    make_probes,
    wait_until_idle,
)
from mlxrun.cli.bench.serve.streaming_client import Clock, Connection, StreamTimes, Target, connect
from mlxrun.cli.bench.serve.workloads import RoundResult, ServePlan, WorkloadKind, make_pages_body

DELAY = 0.5  # seconds between the long prompt and what follows it
ALONE = 5  # short requests before the round, whose median is taken; the first ones warm the server up
LONG_TOKENS = 2

MEASURES = {
    **INTERACTIVE_MEASURES,
    "long_tokens": Measure("tokens of the long prompt", "", None),
    "health_max": Measure("/health, slowest", "ms"),
    "status_max": Measure("/v1/status, slowest", "ms"),
    "errors": Measure("errors", ""),
}


async def run_interactive_round(
    target: Target, plan: ServePlan, seed: str, clock: Clock = time.perf_counter
) -> RoundResult:
    """Run one round. If one of its requests fails, there are no numbers."""
    async with connect(target, plan.load.timeout, clock) as connection:
        probes = make_probes(plan.size, seed)
        alone = [await connection.stream_chat(next(probes)) for _ in range(ALONE)]
        if lost := next((s.error for s in alone if s.error is not None), None):
            return make_failed_round(MEASURES, f"a short request before the round: {lost}")
        usual = max(s.end - s.sent for s in alone)
        watches = [EndpointWatch(connection, path) for path in ("/health", "/v1/status")]
        for watch in watches:
            await watch.find()
        long, behind = await _send_behind(connection, plan, seed, watches)
        errors = await wait_until_idle(connection, usual, probes)
        after = await _send_after_cancel(connection, plan, seed)
        errors += await wait_until_idle(connection, usual, probes)
    for name, seen in (("the long prompt", long), ("the short one behind it", behind), ("the last", after)):
        if seen.error is not None:
            return make_failed_round(MEASURES, f"{name}: {seen.error}")
    errors += [error for watch in watches for error in watch.errors]
    own = statistics.median(s.deltas[0] - s.sent for s in alone[1:])
    numbers = {
        "alone": own,
        "behind": behind.deltas[0] - behind.sent,
        "ratio": (behind.deltas[0] - behind.sent) / own if own else None,
        "after_cancel": after.deltas[0] - after.sent,
        "long_ttft": long.deltas[0] - long.sent,
        "long_tokens": long.prompt or None,
        "health_max": max(watches[0].seconds, default=None),
        "status_max": max(watches[1].seconds, default=None),
        "errors": len(errors),
    }
    return RoundResult(numbers, tuple(errors))


def _make_long_body(plan: ServePlan, seed: str) -> dict[str, Any]:
    if plan.size.pages:
        return make_pages_body(plan.size.pages, LONG_TOKENS, seed)
    return make_chat_body(plan.size.long, LONG_TOKENS, seed)


async def _send_behind(
    connection: Connection, plan: ServePlan, seed: str, watches: list[EndpointWatch]
) -> tuple[StreamTimes, StreamTimes]:
    """The times of a long prompt, and of a short one that comes while it prefills."""
    long = StreamTimes()
    body = _make_long_body(plan, f"{seed} long")
    sending = asyncio.create_task(connection.stream_chat(body, long))
    watching = [asyncio.create_task(watch.run(lambda: long.done)) for watch in watches]
    try:
        await asyncio.sleep(DELAY)
        short = make_chat_body(plan.size.prompt, SHORT_TOKENS, f"{seed} behind")
        behind = await connection.stream_chat(short)
        await sending
        await asyncio.gather(*watching)
    finally:
        for task in (sending, *watching):
            task.cancel()
    if behind.error is None and long.error is None and behind.sent >= long.deltas[0]:
        behind.error = "the long prompt was done before it came; give more --long-words or --pages"
    return long, behind


async def _send_after_cancel(connection: Connection, plan: ServePlan, seed: str) -> StreamTimes:
    """The times of a short request that is sent as the client of a long prompt disconnects."""
    body = _make_long_body(plan, f"{seed} abandoned")
    sending = asyncio.create_task(connection.stream_chat(body))
    await asyncio.sleep(DELAY)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return await connection.stream_chat(make_chat_body(plan.size.prompt, SHORT_TOKENS, f"{seed} after"))


def _describe_round(settings: Mapping[str, Any]) -> str:
    pages, words = settings["pages"], settings["long_words"]
    long = f"PDF of {pages} pages" if pages else f"prompt of {words} words"
    return (
        f"interactive: a request of {settings['prompt_words']} words alone; {DELAY} s behind a {long}; and "
        "as the client of such a prompt disconnects"
    )


INTERACTIVE = WorkloadKind(
    MEASURES,
    run_interactive_round,
    frozenset({"prompt_words", "long_words", "pages"}),
    _describe_round,
    "ratio",
)
