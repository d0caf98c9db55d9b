"""Whoever waits until nothing is being answered waits for the last block, however it ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

from mlxrun.server.engine_state import ActiveCount


async def test_it_is_idle_once_the_last_block_has_ended() -> None:
    active = ActiveCount()
    await active.wait_idle()
    first, second = ExitStack(), ExitStack()
    first.enter_context(active.hold())
    second.enter_context(active.hold())
    waiting = asyncio.ensure_future(active.wait_idle())
    first.close()
    await asyncio.sleep(0)
    assert active.count == 1 and not waiting.done()
    second.close()
    await waiting
    assert active.count == 0


async def test_a_block_that_fails_counts_no_more() -> None:
    active = ActiveCount()
    with suppress(ValueError), active.hold():
        raise ValueError
    await active.wait_idle()
    assert active.count == 0
