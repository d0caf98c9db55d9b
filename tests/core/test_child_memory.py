"""Children are limited by the kernel where it does so, and watched by their parent where it does not."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mlxrun.core import child_memory
from mlxrun.core.child_memory import limit_own_memory, read_memory, watch_memory
from tests.helpers.command_processes import start_program

SIZE = 200_000_000
HOLDS = f"x = b'1' * {SIZE}; print(len(x), flush=True); input()"
needs_ps = pytest.mark.skipif(not os.path.exists("/bin/ps"), reason="there is no ps")


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that enforces nothing, as that of macOS."""
    monkeypatch.setattr(child_memory, "has_kernel_limits", lambda: False)
    child_memory._warn_once.cache_clear()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that has so many bytes in memory."""
    with start_program([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == f"{SIZE}\n"
        yield process


@needs_ps
def test_memory_of_a_process(child: subprocess.Popen[str]) -> None:
    used = read_memory(child.pid)
    assert used is not None and SIZE < used < SIZE + 100_000_000
    child.kill()
    child.wait()
    assert read_memory(child.pid) is None


@needs_ps
def test_a_child_that_takes_more_is_ended(no_limits: None, child: subprocess.Popen[str]) -> None:
    with watch_memory(child.pid, SIZE, child.kill) as exceeded:
        assert child.wait(60) < 0
    assert exceeded.is_set()


@needs_ps
def test_a_child_within_its_limit_is_left_alone(
    no_limits: None, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, read = threading.Semaphore(0), read_memory

    def count(pid: int) -> int | None:
        readings.release()
        return read(pid)

    monkeypatch.setattr(child_memory, "read_memory", count)
    with watch_memory(child.pid, 2 * SIZE, child.kill) as exceeded:
        assert all(readings.acquire(timeout=60) for _ in range(3))
    assert not exceeded.is_set() and child.poll() is None


def test_nobody_watches_where_the_kernel_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    before = threading.active_count()
    with watch_memory(os.getpid(), 1, lambda: pytest.fail("it was ended")) as exceeded:
        assert threading.active_count() == before and not exceeded.is_set()


def test_without_ps_the_log_says_so_once(
    no_limits: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/bin/ps")

    monkeypatch.setattr(subprocess, "run", fail)
    with caplog.at_level(logging.WARNING):
        assert read_memory(1) is None and read_memory(1) is None
    assert [record.getMessage() for record in caplog.records] == [
        "the memory of processes that read files and score answers is not limited: "
        "[Errno 2] No such file or directory: '/bin/ps'"
    ]


@pytest.mark.parametrize(("system", "expected"), [("darwin", []), ("linux", [(9, (5, 5))])])
def test_limits_are_set_where_they_are_enforced(
    monkeypatch: pytest.MonkeyPatch, system: str, expected: list[object]
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: calls.append(arguments))
    limit_own_memory(9, 5)
    assert calls == expected
