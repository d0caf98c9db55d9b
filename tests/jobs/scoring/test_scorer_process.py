"""Child processes of scorers: they are kept, limited, killed, and end with the process that started them."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core import child_memory
from mlxrun.jobs.scoring import scorer_process
from mlxrun.jobs.scoring.scorer_process import ScorerEnded, ScorerLimits, ScorerPool, end_scorers_by
from tests.helpers.command_processes import PATIENCE, is_asleep, run_program, start_program, wait_until

LIMITS = ScorerLimits(30.0, 1_000_000_000)


@pytest.fixture
def pool() -> Iterator[ScorerPool]:
    pool = ScorerPool(LIMITS)
    yield pool
    scorer_process._close_all(pool._idle)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has waited for."""
    found = run_program(["ps", "-o", "stat=", "-p", str(pid)])
    return not found.stdout.strip() or found.stdout.startswith("Z")


def test_a_child_is_kept(pool: ScorerPool) -> None:
    first = pool.call("os:getpid")
    assert first != os.getpid()
    assert [pool.call("os:getpid") for _ in range(5)] == [first] * 5
    assert pool.call("builtins:sorted", [3, 1.5, 2]) == [1.5, 2, 3]
    text = "\ud800\u2028" * 1_000_000
    assert pool.call("builtins:str", text) == text


def test_as_many_children_as_calls(pool: ScorerPool) -> None:
    found: list[int] = []

    def call() -> None:
        pool.call("time:sleep", 0.5)
        found.append(pool.call("os:getpid"))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(pool._idle) <= 3 and len(found) == 3


def test_limits_of_time(pool: ScorerPool) -> None:
    pool.limits = ScorerLimits(0.5, LIMITS.memory)
    pid = pool.call("os:getpid")
    with pytest.raises(ScorerEnded, match=r"it took more than 0\.5 s"):
        pool.call("time:sleep", 600)
    assert has_ended(pid)
    assert pool.call("os:getpid") != pid


def test_limits_of_memory() -> None:
    pool = ScorerPool(ScorerLimits(60.0, 300_000_000))
    with pytest.raises(ScorerEnded, match=r"it took more than 0\.3 GB of memory"):
        pool.call("builtins:bytearray", 1_000_000_000)
    with pytest.raises(ScorerEnded):  # a megabyte of it is no JSON, which is another end than that of memory
        pool.call("builtins:bytearray", 1_000_000)


@pytest.mark.skipif(not os.path.exists("/bin/ps"), reason="there is no ps")
def test_limits_of_memory_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: the parent watches the child, and the next call gets another one."""
    start = scorer_process.start_module

    def start_without_limit(module: str, channel: int, memory: int, **options: Any) -> Any:
        return start(module, channel, 100 * memory, **options)

    monkeypatch.setattr(child_memory, "has_kernel_limits", lambda: False)
    monkeypatch.setattr(scorer_process, "start_module", start_without_limit)
    pool = ScorerPool(ScorerLimits(60.0, 300_000_000))
    with pytest.raises(ScorerEnded, match=r"it took more than 0\.3 GB of memory"):
        pool.call("builtins:exec", "x = b'1' * 400_000_000; import time; time.sleep(600)")
    assert pool.call("builtins:len", "four") == 4


def test_a_call_is_killed_from_another_thread(pool: ScorerPool) -> None:
    """By what `end_scorers_by` gets; its own error is raised by the next call."""
    pid = pool.call("os:getpid")

    @contextlib.contextmanager
    def end_by(kill: Callable[[], None]) -> Iterator[None]:
        timer = threading.Timer(0.2, kill)
        timer.start()
        yield
        timer.cancel()

    with end_scorers_by(end_by), pytest.raises(ScorerEnded, match="ended by SIGKILL"):
        pool.call("time:sleep", 600)
    assert has_ended(pid)


def test_a_child_ends_with_its_pool() -> None:
    pool = ScorerPool(LIMITS)
    pid = pool.call("os:getpid")
    del pool
    gc.collect()
    assert has_ended(pid)


def test_a_child_ends_with_a_parent_that_has_not_read_its_reply() -> None:
    """Its socket is then reset, not only closed."""
    child = scorer_process._Child(LIMITS)
    select.select([child._socket], [], [], 60)  # the child has sent that it is ready
    child._socket.close()
    wait_until(lambda: child._process.poll() is not None)
    assert child._process.returncode == 0


CODE = """
import threading, time
from mlxrun.jobs.scoring.scorer_process import *
pool = ScorerPool(ScorerLimits(600.0, 10**9))
print(pool.call("os:getpid"), flush=True)
threading.Thread(target=pool.call, args=("time:sleep", 600), daemon=True).start()
time.sleep(600)
"""


INTERRUPTED_CODE = """
from mlxrun.jobs.scoring.scorer_process import *
pool = ScorerPool(ScorerLimits(600.0, 10**9))
print(pool.call("os:getpid"), flush=True)
try:
    pool.call("time:sleep", 600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    input()
"""


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open({path!r}, "w") as file:
            print(os.getpid(), file=file)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
EXIT = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)\nos._exit(3)"
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="they are found in /proc")


def read_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@needs_proc
@pytest.mark.parametrize("exits", [False, True])
def test_what_a_child_starts_in_another_session_ends_with_it(tmp_path: Path, exits: bool) -> None:
    """Also where the child has ended by itself."""
    pool, path = ScorerPool(LIMITS), tmp_path / "pid"
    pool.call("builtins:exec", DAEMON.format(path=str(path)))
    pid = read_pid(path)
    assert not has_ended(pid)
    if exits:
        with pytest.raises(ScorerEnded, match="exit code 3"):
            pool.call("builtins:exec", EXIT.format(path=str(path)))
    else:
        pool.close()
    wait_until(lambda: has_ended(pid))


# Returns once the parent has gone, which the thread that reads notices late.
LATE = """
import os, sys, time
child, parent = sys.modules["__main__"], os.getppid()
child.end_marked = lambda mark, end=child.end_marked, wait=time.sleep: (wait(1), end(mark))
{daemon}
while os.getppid() == parent: time.sleep(0.01)
"""


@needs_proc
@pytest.mark.parametrize("late", [False, True])
def test_it_ends_with_the_parent_too(tmp_path: Path, late: bool) -> None:
    """Also where the reply finds nobody before the end of the requests is seen."""
    path = tmp_path / "pid"
    daemon = DAEMON.format(path=str(path))
    daemon = LATE.format(daemon=daemon) if late else daemon
    code = CODE.replace("print(", f"pool.call('builtins:exec', {daemon!r})\nprint(")
    with start_program([sys.executable, "-c", code]) as parent:
        pid = read_pid(path)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: has_ended(pid))


def test_an_interrupt_kills_the_child() -> None:
    """Ctrl-C is raised where the main thread waits, and the process itself goes on."""
    with start_program([sys.executable, "-c", INTERRUPTED_CODE], stdin=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: is_asleep(parent.pid))
        parent.send_signal(signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        wait_until(lambda: has_ended(pid))
        parent.stdin.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number: int) -> None:
    """However that ends, and also while it is busy."""
    with start_program([sys.executable, "-c", CODE]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(number)
        assert parent.wait(PATIENCE) == -number
    wait_until(lambda: has_ended(pid))


def test_the_kernel_ends_what_lets_no_thread_run(pool: ScorerPool) -> None:
    """A call that never comes back is ended by its own alarm, where the parent cannot do it any more."""
    pool.limits = ScorerLimits(0.5, LIMITS.memory)
    pid = pool.call("os:getpid")
    child: Any = pool._idle[0]
    request = b'["time:sleep", [600]]'
    child._socket.sendall(scorer_process.HEAD.pack(0.5, len(request)) + request)
    wait_until(lambda: has_ended(pid))
    assert child._process.wait(PATIENCE) == -signal.SIGALRM
    assert pool.call("os:getpid") != pid  # it is not the next call that has taken too long


SUSPENDED_CODE = """
from mlxrun.core import processes
from mlxrun.jobs.scoring.scorer_process import *
{twin}
pool = ScorerPool(ScorerLimits({limit}, 10**9))
print(pool.call("os:getpid"), flush=True)
try:
    print(pool.call("suspending_scorer:suspend", {whole}))
except ScorerEnded as error:
    print(error)
print(pool.call("os:getpid"), flush=True)
"""
# The first call suspends the process that made it, and itself: at the same moment on any machine.
SUSPENDING = """
import os, pathlib, signal

def suspend(whole):
    called = pathlib.Path(f"called-{os.getppid()}")
    if not called.exists():
        called.touch()
        os.kill(os.getppid(), signal.SIGSTOP)
        if whole:
            os.kill(os.getpid(), signal.SIGSTOP)
"""
COUNTED = "processes.GAP = float('inf')"
LIMIT, SUSPENDED = 2.0, 3.2  # seconds: longer than the child's alarm, which rings a second behind the limit


def is_suspended(pid: int) -> bool:
    found = run_program(["ps", "-o", "stat=", "-p", str(pid)])
    return found.stdout.startswith("T")


def test_suspended_time_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the child was suspended too, its alarm has ended it, and the call begins anew. If only the parent
    was, the reply is there already. The twin counts the time. All three are suspended at once."""
    (tmp_path / "suspending_scorer.py").write_text(SUSPENDING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    with contextlib.ExitStack() as opened:

        def start(whole: bool, twin: str = "") -> tuple[Any, int, list[int]]:
            """A process, its child, and which of them are suspended."""
            code = SUSPENDED_CODE.format(twin=twin, whole=whole, limit=LIMIT)
            command = [sys.executable, "-c", code]
            process: Any = opened.enter_context(start_program(command, cwd=tmp_path))
            child = int(process.stdout.readline())
            return process, child, [process.pid, child] if whole else [process.pid]

        both, twin, parent = all_three = [start(True), start(True, COUNTED), start(False)]
        stopped = [pid for *_, pids in all_three for pid in pids]
        wait_until(lambda: all(map(is_suspended, stopped)))
        time.sleep(SUSPENDED)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        found = [process.communicate(timeout=60)[0].splitlines() for process, *_ in all_three]
        assert [process.returncode for process, *_ in all_three] == [0, 0, 0]
        assert [said for said, _ in found] == ["None", "it took more than 2 s", "None"]
        kept = [int(after) == child for (_, after), (_, child, _) in zip(found, all_three, strict=True)]
        assert kept == [False, False, True]


@pytest.mark.parametrize(("code", "hint"), [("os._exit(7)", False), ("os.kill(os.getpid(), 9)", True)])
def test_memory_is_named_where_it_may_be_the_cause(pool: ScorerPool, code: str, hint: bool) -> None:
    with pytest.raises(ScorerEnded, match="its process ended") as caught:
        pool.call("builtins:exec", f"import os; {code}")
    assert ("GB of memory" in str(caught.value)) is hint
