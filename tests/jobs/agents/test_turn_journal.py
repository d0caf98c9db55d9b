"""The journal of turns: cut or damaged at any place, it gives a beginning of the steps and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.agents.agent_answerer import AgentAnswerer
from tests.helpers.agent_bench import AgentBench, agent_line, answer_in_turn, call, write_tools
from tests.helpers.batch_fakes import write_job

ANSWERS = [call("add", number=1), call("add", number=2), "Three."]


async def keep_turns(bench: AgentBench, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Run a job with one conversation; its journal as a kill before the record would leave it."""
    kept, own = [], AgentAnswerer.answer

    async def answer(self: AgentAnswerer, *arguments: Any) -> Any:
        found = await own(self, *arguments)
        kept.append(bench.paths.turns.read_bytes())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(AgentAnswerer, "answer", answer)
        await bench.run()
    return kept[0]


async def make_journal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[AgentBench, bytes, bytes]:
    """A job whose conversation is done, its record, and its journal."""
    write_tools(folder)
    bench = AgentBench(write_job(folder, [agent_line()]), script=answer_in_turn(*ANSWERS))
    turns = await keep_turns(bench, monkeypatch)
    return bench, bench.paths.out.read_bytes(), turns


async def test_a_damaged_journal_costs_turns_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, record, turns = await make_journal(tmp_path, monkeypatch)
    lines = turns.splitlines(keepends=True)
    assert len(lines) == 5
    damaged = [
        (turns, 0),
        (turns[:-7], 1),
        (b"".join(lines[:2]), 2),
        (b"".join([lines[0], lines[2], lines[3], lines[4]]), 2),
        (turns.replace(b'"content":"1"', b'"content":"7"'), 2),
        (b"\xff\x00\n" + turns, 0),
        (b"", 3),
    ]
    for content, answers in damaged:
        for path in (bench.paths.out, bench.paths.journal):
            path.unlink()
        bench.paths.turns.write_bytes(content)
        await bench.run()
        assert bench.paths.out.read_bytes() == record and len(bench.prompts) == answers, content


async def test_steps_of_another_line_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key has the whole line: an edited one begins anew."""
    bench, _, turns = await make_journal(tmp_path, monkeypatch)
    write_job(tmp_path, [agent_line(state={"total": 5})])
    bench.paths.turns.write_bytes(turns)
    await bench.run()
    assert len(bench.prompts) == 3 and bench.read_record()["agent"]["state"] == {"total": 8}
