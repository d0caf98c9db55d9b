"""SIGINT, SIGTERM and SIGHUP in quick succession, at random moments of commands that load, compute, write and
end: each ends soon, by the signal or in order, without a stack; the next start goes on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.command_processes import ROOT, read_log, run_program, start_command
from tests.helpers.storm_counts import count, make_rng
from tests.helpers.suite_files import write_suite

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAUSES = (0.0, 0.0, 0.001, 0.01, 0.05, 0.3, 0.7)  # seconds at most between two signals
STACKS = ("Traceback", "this is a bug in mlxrun", "Exception ignored", "Fatal Python", "terminate called")
BOUND = 120.0  # seconds until a command has ended after its last signal, on whatever machine
SETS = ("engine.reproducible=true", "batch.order=input", "scheduler.max_running=4")
SUITE = """
    models:
      a: {set: {engine.reproducible: true}}
    tasks:
      plain: {data: rows.csv, prompt: "say {{ n }}", expected: n, generation: {max_tokens: 20}}
      raw: {data: rows.csv, prompt: "once {{ n }}", endpoint: completion, generation: {n: 2, max_tokens: 9}}
"""


def make_folder(folder: Path, command: str) -> list[str]:
    """A folder with what a command needs; its arguments."""
    folder.mkdir()
    if command == "eval":
        suite = write_suite(folder, SUITE, rows_csv="n\n" + "".join(f"{n}\n" for n in range(6)))
        return ["eval", suite.name]
    if command == "serve":
        return ["serve", "--port", "0", "--set", "server.data_path=data"]
    lines = (ROOT / "jobs" / "eval.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "job.jsonl").write_text("".join(lines[:12]), encoding="utf-8")
    return ["batch", "job.jsonl", *(each for text in SETS for each in ("--set", text))]


def read_outputs(folder: Path) -> dict[str, dict[str, bytes]]:
    """The records of each output by id; each may be there once. A last one that is not whole does not count:
    of a command that a second signal has killed, as of one that was killed by SIGKILL."""
    found = {}
    for path in filter(Path.is_file, sorted(folder.rglob("*.out.jsonl"))):
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        found[str(path.relative_to(folder))] = records = {
            json.loads(line)["custom_id"]: line for line in lines
        }
        assert len(records) == len(lines), f"{path}: a line is there twice"
    return found


def send_signals(process: subprocess.Popen[str], rng: random.Random) -> int:
    """Some signals in quick succession; how many met the process."""
    sent = 0
    for _ in range(rng.randrange(1, 12)):
        if process.poll() is not None:
            break
        process.send_signal(rng.choice(SIGNALS))
        sent += 1
        time.sleep(rng.choice(PAUSES) * rng.random())
    count("signals", sent)
    return sent


def run_storm(folder: Path, arguments: list[str], seconds: float, rng: random.Random) -> None:
    """One start that gets its signals after a part of the time that a whole run takes."""
    process, until = start_command(folder, *arguments), time.monotonic() + rng.random() * seconds
    try:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        sent = send_signals(process, rng)
        if arguments[0] == "serve" and process.poll() is None:
            process.send_signal(signal.SIGTERM)  # SIGHUP alone does not end it
        code = process.wait(BOUND)
    finally:
        process.kill()
        process.wait()
    assert code in {0, 130, *(-number for number in SIGNALS)} if sent else code == 0, read_log(folder)
    said = [word for word in STACKS if word in read_log(folder)]
    assert not said, read_log(folder)
    assert not list_session(process.pid), "something is left"


def list_session(session: int) -> list[str]:
    """The processes that a command has started and that have not ended."""
    done = run_program(["ps", "-eo", "sid=,stat=,args="], check=True)
    rows = (line.split(None, 2) for line in done.stdout.splitlines())
    return [args for sid, stat, args in rows if int(sid) == session and not stat.startswith("Z")]


def check_storms(tmp_path: Path, command: str, storms: int, rng: random.Random) -> None:
    """A command that is interrupted again and again; in the end its files are those of one left alone."""
    began = time.monotonic()
    arguments = make_folder(tmp_path / "whole", command)
    process = start_command(tmp_path / "whole", *arguments)
    assert process.wait(BOUND * 3) == 0, read_log(tmp_path / "whole")
    seconds = time.monotonic() - began
    wanted, folder = read_outputs(tmp_path / "whole"), tmp_path / "stormed"
    make_folder(folder, command)
    for _ in range(storms):
        before = read_outputs(folder)
        run_storm(folder, arguments, seconds * 1.1, rng)
        after = read_outputs(folder)
        assert all(records.items() <= after[name].items() for name, records in before.items())
    assert start_command(folder, *arguments).wait(BOUND * 3) == 0, read_log(folder)
    assert read_outputs(folder) == wanted


@pytest.mark.slow
def test_a_job_in_a_storm(tmp_path: Path, night: int) -> None:
    check_storms(tmp_path, "batch", 2, make_rng(0, night))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("command", ["batch", "eval"])
def test_jobs_and_suites_in_storms(tmp_path: Path, command: str, seed: int, night: int) -> None:
    check_storms(tmp_path, command, 15, make_rng(seed, night))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 5))
def test_servers_in_storms(tmp_path: Path, seed: int, night: int) -> None:
    """While they load, and ready ones."""
    rng, arguments = make_rng(seed, night), make_folder(tmp_path / "serve", "serve")
    for _ in range(15):
        run_storm(tmp_path / "serve", arguments, 8.0, rng)
