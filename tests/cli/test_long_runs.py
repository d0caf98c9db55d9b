"""Open files are raised where the system lets it; a job keeps the machine awake, and never longer."""

from __future__ import annotations

import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxrun.cli import long_runs
from mlxrun.cli.long_runs import OPEN_FILES, keep_awake, raise_open_files
from mlxrun.cli.main import main
from mlxrun.config.settings import Config
from tests.helpers.batch_fakes import chats, write_job
from tests.helpers.command_processes import start_program, wait_until

INFINITE = resource.RLIM_INFINITY
# Fakes of the programs: each writes its number and its arguments, then lasts as the real one does.
CAFFEINATE = 'echo $$ "$@" > {log}; exec sleep 600'
INHIBIT = 'echo $$ "$@" > {log}; while [ "${{1#--}}" != "$1" ]; do shift; done; exec "$@"'


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls of setrlimit."""
    calls: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: calls.append(pair))
    return calls


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ((256, INFINITE), (OPEN_FILES, INFINITE)),  # a shell of macOS
        ((256, 4096), (4096, 4096)),
        ((1024, 1 << 20), (OPEN_FILES, 1 << 20)),  # Linux
        ((1 << 16, 1 << 20), (1 << 16, 1 << 20)),
        ((INFINITE, INFINITE), (INFINITE, INFINITE)),
    ],
)
def test_open_files(
    limits: list[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    now: tuple[int, int],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now)
    raise_open_files()
    assert limits == [expected] and caplog.records == []


def test_few_open_files_are_logged(
    limits: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 300))
    raise_open_files()
    assert "at most 300 files may be open at once (the hard limit is 300)" in caplog.text


def test_a_system_that_refuses_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: int, pair: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, INFINITE))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_open_files()
    assert "at most 256 files may be open at once (current limit exceeds maximum limit)" in caplog.text


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, system: str, name: str, script: str) -> Path:
    """A system with this program first on the PATH; returns the file that the program writes."""
    log = folder / "log"
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script.format(log=log)}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "system", lambda: system)
    return log


def read_call(log: Path) -> tuple[int, list[str]]:
    """The number and the arguments of the program, once it has started."""
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    number, *arguments = log.read_text().split()
    return int(number), arguments


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("setting", ["auto", "always"])
def test_macos_is_kept_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    log = install(tmp_path, monkeypatch, "Darwin", "caffeinate", CAFFEINATE)
    with keep_awake(setting):
        pid, arguments = read_call(log)
        assert arguments == ["-i", "-w", str(os.getpid())] and is_running(pid)
    assert not is_running(pid)


def test_linux_is_kept_awake_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, "Linux", "systemd-inhibit", INHIBIT)
    with keep_awake("always"):
        pid, arguments = read_call(log)
        assert arguments[:2] == ["--what=idle:sleep", "--who=mlxrun"] and arguments[-1] == "cat"
        assert is_running(pid)
    assert not is_running(pid)


@pytest.mark.parametrize(("system", "setting"), [("Darwin", "never"), ("Linux", "never"), ("Linux", "auto")])
def test_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, setting: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: pytest.fail(command[0]))
    monkeypatch.setattr(platform, "system", lambda: system)
    with keep_awake(setting):
        pass


@pytest.mark.parametrize(("setting", "count"), [("auto", 0), ("always", 1)])
def test_a_machine_without_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str, count: int
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with keep_awake(setting):
        pass
    assert caplog.text.count("there is no caffeinate here") == count


def test_a_program_that_is_refused_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by polkit, which lets nobody who is not at the machine keep it awake."""
    log = install(tmp_path, monkeypatch, "Linux", "systemd-inhibit", "echo $$ > {log}; exit 1")
    with caplog.at_level(logging.WARNING), keep_awake("always"):
        pid = read_call(log)[0]
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert "systemd-inhibit ended early, with exit code 1" in caplog.text


KILLED = """
import platform, time
platform.system = lambda: "Linux"
from mlxrun.cli.long_runs import keep_awake
with keep_awake("always"):
    print("awake", flush=True)
    time.sleep(600)
"""


def test_a_killed_job_lets_the_machine_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, "Linux", "systemd-inhibit", INHIBIT)
    with start_program([sys.executable, "-c", KILLED]) as process:
        pid = read_call(log)[0]
        process.kill()
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("options", [[], ["--set", "batch.keep_awake=never"], ["--dry-run"]])
def test_a_job_keeps_a_mac_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_engine: list[Config], options: list[str]
) -> None:
    log, end = install(tmp_path, monkeypatch, "Darwin", "caffeinate", CAFFEINATE), long_runs.end_process

    def end_when_started(process: subprocess.Popen[bytes]) -> None:
        read_call(log)
        end(process)

    monkeypatch.setattr(long_runs, "end_process", end_when_started)
    assert main(["batch", str(write_job(tmp_path, chats(2))), *options]) == 0
    assert log.exists() == (options == [])
