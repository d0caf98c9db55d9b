"""Impure twins: engines with a fault that the test has to find, or it would prove nothing.

Each is what other engines do: sampling from the process's random state, so that a token depends on how many
were sampled before; continuing from any cached prefix, so that the rest of a prompt is computed in other
chunks than alone; computing what a preempted row has generated as a part of its prompt; and taking as many
threads of BLAS as the environment gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.reproduce.replacement import replace_name

GLOBAL_RANDOM, OFF_GRID = "global random state", "hit off the grid"
AS_PROMPT, OTHER_THREADS = "preempted answers as prompts", "two BLAS threads"


@contextmanager
def sample_from_global_state() -> Iterator[None]:
    """Sampled tokens depend on the random state of the process."""
    import mlx.core as mx

    from mlxrun.model.run import sampler

    def make_key(seed: int, position: int) -> tuple[int, int]:
        high, low = mx.random.randint(0, 2**31 - 1, (2,)).tolist()
        return int(high), int(low)

    with replace_name(sampler, "_make_key", make_key):
        yield


@contextmanager
def hit_off_the_grid() -> Iterator[None]:
    """Cached prefixes are used up to any token, not only up to a multiple of the chunk."""
    from mlxrun.engine import build
    from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache

    def make_cache(*arguments: Any, **options: Any) -> Any:
        return PrefixCache(*arguments, **{**options, "grid_only": False})

    with replace_name(build, "PrefixCache", make_cache):
        yield


@contextmanager
def compute_answers_as_prompts() -> Iterator[None]:
    """What a preempted row has generated is computed again as a part of its prompt."""
    from mlxrun.engine import build
    from mlxrun.engine.scheduler.scheduler import Scheduler

    def make_scheduler(*arguments: Any, **options: Any) -> Any:
        return Scheduler(*arguments, **{**options, "regenerates": False})

    with replace_name(build, "Scheduler", make_scheduler):
        yield


@contextmanager
def compute_with_two_threads() -> Iterator[None]:
    """Engines have two threads of BLAS, as the environment of another process may give them."""
    from mlxrun.engine import build

    with replace_name(build, "choose_blas_threads", lambda settings: 2):
        yield


# Those that show where rows are preempted. The others show in any company.
PREEMPTED_TWINS: dict[str, Callable[[], Any]] = {AS_PROMPT: compute_answers_as_prompts}


def list_twins() -> dict[str, Callable[[], Any]]:
    """The twins that this machine can have: without OpenBLAS there are no threads to differ in."""
    import mlxrun.model  # noqa: F401  the BLAS library goes before mlx
    from mlxrun.model.machine.blas import find_loaded_blas
    from mlxrun.model.machine.device import get_backend

    found = {GLOBAL_RANDOM: sample_from_global_state, OFF_GRID: hit_off_the_grid}
    if get_backend() == "cpu" and find_loaded_blas() is not None:
        found[OTHER_THREADS] = compute_with_two_threads
    return found
