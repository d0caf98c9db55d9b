"""With engine.reproducible, the threads that the environment has for BLAS change no byte.

Each run is a process of its own, with OpenBLAS' kernels for x86 processors without AVX-512: with those, most
sums depend on the number of threads, which the twin shows. Workers on Ray are in tests/distributed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.reproduce.answers import read_answers, read_records, strip_ids
from benchmarks.reproduce.lines import LineWriter
from benchmarks.reproduce.processes import make_environment, run_batch
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.model.machine.blas import find_loaded_blas
from tests.helpers.command_processes import run_program

LINES = 16
SETTINGS = {"engine": {"reproducible": True}, "sampling": {"seed": 3}, "log": {"level": "warning"}}
MAIN = "import sys; from mlxrun.cli.main import main; sys.exit(main(sys.argv[1:]))"
# The twin: as many threads as there are, as without the guard.
FREE = """
import mlxrun.model
from mlxrun.engine import build
from mlxrun.model.machine import device
build.choose_blas_threads = device.choose_blas_threads = lambda settings: None
from contextlib import nullcontext
build.follow_free_cores = lambda: nullcontext(lambda: None)  # the environment alone decides
"""


def find_kernel_problem() -> str:
    """Why threads could not be told apart here; empty: they can."""
    flags = Path("/proc/cpuinfo")
    if find_loaded_blas() is None:
        return "there is no OpenBLAS here"
    if platform.machine() != "x86_64" or " avx2 " not in flags.read_text():
        return "this processor has no AVX2, whose kernels depend on the number of threads"
    return "" if len(os.sched_getaffinity(0)) > 1 else "OpenBLAS has one thread here, for one processor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job with its config, and its answers by one thread in `oracle.out.jsonl`."""
    if problem := find_kernel_problem():
        pytest.skip(problem)
    made = tmp_path_factory.mktemp("threads")
    LineWriter().write(made / "job.jsonl", LINES)
    (made / "config.yaml").write_text(json.dumps(SETTINGS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_CORETYPE", "Haswell")
        run(made, "oracle", 1)
        yield made


def run(folder: Path, name: str, threads: int, *flags: str, code: str = "", exit_code: int = 0) -> bytes:
    """Run the job in a process with so many threads in its environment; the output."""
    out = folder / f"{name}.out.jsonl"
    command = [sys.executable, "-c", code + MAIN, "batch", str(folder / "job.jsonl"), "-o", str(out)]
    command += ["-c", str(folder / "config.yaml"), "--set", "batch.order=input", *flags]
    done = run_program(command, env=make_environment(threads))
    assert done.returncode == exit_code, done.stderr
    return out.read_bytes()


def read_oracle(folder: Path) -> bytes:
    return (folder / "oracle.out.jsonl").read_bytes()


def test_a_job_is_finished_with_other_threads_than_it_was_begun(folder: Path) -> None:
    """The bytes are the same with any threads in the environment, and nothing is refused or mixed."""
    run(folder, "moved", 4, "--limit", "8")
    assert run(folder, "moved", 2) == read_oracle(folder)
    manifest = json.loads(JobPaths(folder / "job.jsonl", folder / "moved.out.jsonl").manifest.read_bytes())
    assert manifest["mixed"] is False and [each["lines"] for each in manifest["runs"]] == [8, 8]
    device = manifest["device"]
    assert (device["blas_threads"], device["blas_threads_fixed"]) == (1, True)
    assert device["blas_kernel"] == "Haswell" and device["blas_version"]


def test_without_the_guard_other_threads_give_other_bytes(folder: Path) -> None:
    """The twin. One thread is what the guard fixes, so that it changes nothing for the lines of the second
    process, which finishes the job."""
    oracle, begun = read_oracle(folder), run(folder, "free", 2, "--limit", "8", code=FREE)
    assert begun != oracle[: len(begun)]
    assert run(folder, "free", 1, code=FREE).splitlines()[8:] == oracle.splitlines()[8:]


def test_threads_that_were_set_are_kept(folder: Path) -> None:
    """Another number in the config is another computation, which the message names."""
    own = ("--set", "engine.blas_threads=2")
    begun = run(folder, "two", 1, *own, "--limit", "8")
    assert begun != read_oracle(folder)[: len(begun)]
    assert run(folder, "two", 1, exit_code=2) == begun
    whole = run(folder, "two", 4, *own)
    assert whole[: len(begun)] == begun and whole != read_oracle(folder)


async def test_a_batch_of_servers_with_other_threads_has_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """The first one is killed, and the second finishes the batch."""
    answers, _ = await run_batch(folder / "job.jsonl", folder / "config.yaml", tmp_path)
    oracle = read_answers(JobPaths(folder / "job.jsonl", folder / "oracle.out.jsonl"))
    assert strip_ids(answers) == strip_ids(oracle)
    assert len(read_records(tmp_path / "batch.out.jsonl")) == LINES
