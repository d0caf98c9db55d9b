"""Scorers that take forever, a few kilobytes each; and limits with which tests of them are fast."""

from __future__ import annotations

import asyncio
import importlib
import signal
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.workers import Lane
from mlxrun.jobs.scoring import line_scores
from mlxrun.jobs.scoring.scorer_process import ScorerLimits, ScorerPool
from tests.helpers.batch_fakes import chat, run_in_process
from tests.helpers.batches_server import ServerSetup
from tests.helpers.command_processes import run_program

LEVELS = 40
# What each process of scorers begins with: imports take long on a busy machine, and are not the scorer's.
SETUP = (f"{line_scores.__name__}:match_fields", {"expected": {}, "match": "json_schema"}, "{}")


def make_bomb_schema(levels: int = LEVELS) -> dict[str, Any]:
    """A schema that is checked 2 ** levels times."""
    defs: dict[str, Any] = {
        f"l{level}": {"allOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 2} for level in range(levels)
    }
    return {"type": "object", "$ref": "#/$defs/l0", "$defs": {**defs, f"l{levels}": {"type": "object"}}}


def set_limits(patch: pytest.MonkeyPatch, seconds: float, memory: int = 1_000_000_000) -> ScorerPool:
    """Replace the limits of mlxrun's own scorers."""
    pool = ScorerPool(ScorerLimits(seconds, memory), setup=SETUP)
    patch.setattr(line_scores, "OWN", pool)
    return pool


def make_bomb_line(custom_id: str = "bomb") -> dict[str, Any]:
    """A job line whose scorer takes forever."""
    return chat(custom_id, "{}", {"expected": make_bomb_schema(), "match": "json_schema"})


class SameProcess(ScorerPool):
    """The guard switched off: calls in this process, which nothing can end."""

    def call(self, target: str, *arguments: Any) -> Any:
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments)


def set_guard(seconds: float) -> None:
    """In a process of its own: the limit of time of scorers; 0: they have no process."""
    limits = ScorerLimits(seconds, 1_000_000_000)
    line_scores.OWN = ScorerPool(limits, setup=SETUP) if seconds else SameProcess(limits)
    line_scores.SCORES = Lane("scores", 4)


def run_job(job: Path, seconds: float) -> None:
    """Run a job in a process of its own, with this limit."""
    set_guard(seconds)
    run_in_process(job, 0.0)


def serve_batches(root: Path, seconds: float) -> None:
    """Run a server in a process of its own, until SIGTERM comes."""

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with ServerSetup(root).run():
            await stop.wait()

    set_guard(seconds)
    asyncio.run(run())


def list_scorers(parent: int) -> list[int]:
    """The processes of scorers that a process has started, and that have not ended."""
    done = run_program(["ps", "-ww", "-eo", "pid=,ppid=,stat=,args="], check=True)
    rows = [line.split(None, 3) for line in done.stdout.splitlines()]
    return [
        int(pid)
        for pid, ppid, stat, args in rows
        if int(ppid) == parent and not stat.startswith("Z") and "mlxrun.jobs.scoring.scorer_process" in args
    ]


def is_running(pid: int) -> bool:
    """Whether a process exists, and is more than an entry that nobody has waited for."""
    done = run_program(["ps", "-o", "stat=", "-p", str(pid)])
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")
