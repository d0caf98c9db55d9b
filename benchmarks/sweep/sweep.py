"""Checks many families, each in a process of its own, so that a crash or a hang ends one family only."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext

from benchmarks.sweep.family import FamilyResult, check_family
from mlxrun.core.child_memory import limit_own_memory

SECONDS = 300  # for one family; a loaded machine is many times slower
SECONDS_TO_END = 30  # for a process whose result is known
MEMORY = 16 << 30  # bytes of address space for one family
PRELOADED = ["benchmarks.sweep.family", "mlx_lm.generate", "mlx_vlm.utils", "transformers"]


def list_families() -> list[tuple[str, str]]:
    """(kind, name) of every text family of the installed mlx-lm, and of those of mlx-vlm that have a tiny
    config, for images and for audio."""
    from benchmarks.tiny.omni_families import FAMILIES
    from benchmarks.tiny.text_configs import list_text_families
    from benchmarks.tiny.vision_families import VISION

    text = [("text", family) for family in list_text_families()]
    return text + [("vision", family) for family in VISION] + [("audio", family) for family in FAMILIES]


def run_sweep(families: Sequence[tuple[str, str]], jobs: int = 1) -> Iterator[FamilyResult]:
    """The result of each family, in order. `jobs`: families that are checked at the same time."""
    # A server that forks has imported MLX, which starts Metal; a fork does not survive that.
    context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
    if sys.platform != "darwin":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(partial(_run_apart, context), *zip(*families, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def _run_apart(context: SpawnContext | ForkServerContext, kind: str, family: str) -> FamilyResult:
    """The result of a family from a process of its own; a process that dies or hangs is a result too."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(sender, kind, family), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            result = receiver.recv()
            assert isinstance(result, FamilyResult)
            process.join(SECONDS_TO_END)  # killed at once, it would leave its semaphores behind
            return result
        return FamilyResult(kind, family, "unbuilt", f"no result in {SECONDS} s")
    except EOFError:
        process.join()
        return FamilyResult(kind, family, "unbuilt", f"the process ended with status {process.exitcode}")
    finally:
        receiver.close()
        process.kill()
        process.join()


def send_result(sender: Connection, kind: str, family: str) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # what libraries print is not part of the report
        os.dup2(silent, output)
    limit_own_memory(resource.RLIMIT_AS, MEMORY)
    sender.send(check_family(kind, family))
