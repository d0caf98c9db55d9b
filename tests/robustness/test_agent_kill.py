"""Conversations with tools in a process that is killed: turns and calls that are done are not repeated, and
the record is that of the same conversation without a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from mlxrun.jobs.agents.turn_journal import TurnJournal
from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.agent_bench import (
    COUNTER,
    AgentBench,
    agent_line,
    answer_in_turn,
    call,
    run_agents_in_process,
    write_tools,
)
from tests.helpers.batch_fakes import by_id, write_job
from tests.helpers.batches_server import make_processes
from tests.helpers.command_processes import PATIENCE, read_log, start_command, wait_until
from tests.helpers.storm_counts import count, make_rng

ANSWERS = [
    call("add", number=1),
    call("add", number=2) + call("add", number=3),
    "Adding one more.\n" + call("add", number=4),
    "Ten.",
]
STEPS = [2, 5, 7]  # that are done before each answer but the first


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    with make_processes() as context:
        yield context


def kill_at(
    processes: ForkServerContext, job: Path, answers: Sequence[str], stop_at: int, steps: int
) -> None:
    """Run the job until so many steps are written and the next answer has begun, and kill it."""
    process = processes.Process(target=run_agents_in_process, args=(job, answers, stop_at))
    process.start()
    turns = JobPaths(job).turns
    wait_until(
        lambda: (turns.exists() and turns.read_bytes().count(b"\n") >= steps) or not process.is_alive()
    )
    assert process.is_alive(), "there was something to kill"
    process.kill()
    process.join()


async def run_whole(folder: Path, line: object) -> bytes:
    """The record of the same conversation in one go: the oracle."""
    folder.mkdir()
    write_tools(folder)
    bench = AgentBench(write_job(folder, [line]), script=answer_in_turn(*ANSWERS))
    await bench.run()
    return bench.paths.out.read_bytes()


async def test_kills_between_turns(tmp_path: Path, processes: ForkServerContext) -> None:
    line = agent_line(state={"total": 0})
    whole = await run_whole(tmp_path / "whole", line)
    write_tools(tmp_path)
    job = write_job(tmp_path, [line])
    for at, steps in enumerate(STEPS, 1):
        kill_at(processes, job, ANSWERS, at, steps)
    bench = AgentBench(job, script=answer_in_turn(*ANSWERS))
    assert (await bench.run()).exit_code == 0
    assert "1 conversation of the last run will be continued" in bench.said
    assert bench.paths.out.read_bytes() == whole
    assert (tmp_path / "tools.py.calls").read_text() == "1\n2\n3\n4\n", "no call was made twice"
    assert len(bench.prompts) == 1, "no answer was made twice"
    assert not bench.paths.turns.exists()


async def test_a_journal_that_is_forgotten_would_be_seen(
    tmp_path: Path, processes: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: earlier steps are not read."""
    write_tools(tmp_path)
    job = write_job(tmp_path, [agent_line()])
    kill_at(processes, job, ANSWERS, 1, STEPS[0])
    monkeypatch.setattr(TurnJournal, "read", lambda self, index: None)
    bench = AgentBench(job, script=answer_in_turn(*ANSWERS))
    await bench.run()
    assert (tmp_path / "tools.py.calls").read_text() == "1\n1\n2\n3\n4\n" and len(bench.prompts) == 4


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.sweep) for seed in range(6)])
async def test_kills_at_any_moment(
    tmp_path: Path, processes: ForkServerContext, seed: int, night: int
) -> None:
    """Eight kills of sixteen conversations: the same records, and a call is made twice only if it ran."""
    names = [f"c{at:02}" for at in range(16)]
    lines = [agent_line(name, tools=[f"{name}.py:add"]) for name in names]
    records = []
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text(COUNTER)
        job, rng = write_job(folder, lines), make_rng(seed, night)
        for _ in range(0 if folder.name == "whole" else 8):
            process = processes.Process(target=run_agents_in_process, args=(job, ANSWERS, 99, 0.05))
            process.start()
            process.join(0.3 + 3 * rng.random())
            count("kills of conversations", int(process.is_alive()))
            process.kill()
            process.join()
        bench = AgentBench(job, script=answer_in_turn(*ANSWERS))
        assert (await bench.run()).exit_code == 0
        records.append(by_id(bench.paths.out))
        for name in names:
            calls = (folder / f"{name}.py.calls").read_text().split()
            assert list(dict.fromkeys(calls)) == ["1", "2", "3", "4"] and len(calls) <= 12
    assert records[0] == records[1] and len(records[0]) == 16


SUITE = """
models: {tiny: {set: {sampling.temperature: 0, engine.reproducible: true}}}
tasks:
  sums:
    rows: [{q: "2 and 3"}]
    prompt: "Add {{ q }}."
    agent: {tools: [tools.py:add], max_turns: 3}
    generation: {tool_choice: required, max_tokens: 60}
    eval: {scorer: tools.py:check}
"""
HOLDING = """
import time
from pathlib import Path
from typing import Literal

def add(number: Literal[2, 3], *, state: dict) -> int:
    "Add a number to the total."
    with open(__file__ + ".calls", "a") as file:
        file.write(f"{number}\\n")
    while state and Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    state["total"] = state.get("total", 0) + number
    return state["total"]

def check(state):
    return state["total"] > 0
"""


@pytest.mark.slow
def test_the_built_in_model_is_killed_while_a_tool_runs(tmp_path: Path) -> None:
    """The call that ran is made again, and nothing else. The same command, another process."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
        write_tools(folder, HOLDING)
        (folder / "suite.yaml").write_text(SUITE)
    whole, killed = folders
    (killed / "hold").touch()
    assert start_command(whole, "eval", "suite.yaml").wait(PATIENCE) == 0, read_log(whole)
    process = start_command(killed, "eval", "suite.yaml")
    calls = killed / "tools.py.calls"
    wait_until(lambda: calls.exists() and calls.read_text().count("\n") == 2, lambda: read_log(killed))
    process.kill()
    process.wait()
    (killed / "hold").unlink()
    assert start_command(killed, "eval", "suite.yaml").wait(PATIENCE) == 0, read_log(killed)
    first, second = ((folder / "suite.out/tiny/sums/seed-0/job.out.jsonl").read_bytes() for folder in folders)
    assert first == second and json.loads(first)["agent"]["calls"] == 3
    made = (whole / "tools.py.calls").read_text().split()
    assert calls.read_text().split() == [*made[:2], made[1], made[2]]
    assert "1 conversation of the last run will be continued" in read_log(killed)
