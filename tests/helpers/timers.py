"""Lets time pass for one thing alone: no test waits for it, or depends on how fast a machine is."""

from __future__ import annotations

import asyncio

FAR = 100.0  # seconds


def fire_timers(name: str) -> None:
    """Call now what the running loop has scheduled for more than FAR seconds later: functions whose qualified
    names are `name`. There must be one."""
    loop = asyncio.get_running_loop()
    found = [
        handle
        for handle in tuple(loop._scheduled)  # type: ignore[attr-defined]
        if not handle.cancelled()
        and getattr(handle._callback, "__qualname__", "") == name
        and handle.when() > loop.time() + FAR
    ]
    assert found, f"{name} is not scheduled"
    for handle in found:
        handle._run()
        handle.cancel()
