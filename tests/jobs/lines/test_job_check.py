"""Lines are checked without an engine, all of them before one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_check import check_chats, check_job
from mlxrun.jobs.lines.line_index import LineIndex
from mlxrun.jobs.lines.line_keys import LineKeys
from mlxrun.jobs.run.line_answerer import LinePreparer
from tests.helpers.batch_fakes import MIXED, Bench, chat, chats, make_config, write_job
from tests.helpers.tokenizers import FakeModelInfo


@pytest.mark.parametrize("options, batch", [({"strict": True}, {}), ({}, {"on_invalid": "fail"})])
async def test_strict(tmp_path: Path, options: dict[str, Any], batch: dict[str, Any]) -> None:
    """All bad lines with file:line, exit 2, nothing run; a good job runs."""
    lines = [line for line in MIXED if "long" not in str(line)]  # that one only the engine can refuse
    bench = Bench(write_job(tmp_path, lines), make_config(**batch))
    with pytest.raises(JobError, match="4 of 6 lines refused; nothing was run") as caught:
        await bench.run(**options)
    assert caught.value.exit_code == 2
    assert [text.split(": ")[0] for text in bench.said] == [f"{bench.job}:{n}" for n in (2, 3, 4, 6)]
    assert (bench.ran, bench.paths.out.exists(), bench.paths.manifest.exists()) == (0, False, False)
    write_job(tmp_path, chats(3))
    assert (await bench.run(**options)).exit_code == 0


async def test_a_job_file_is_checked_on_its_own(tmp_path: Path) -> None:
    """Totals of the good lines, reports of the others with their numbers; `limit` counts all lines."""
    lines = [
        chat("a", "hello", n=2, max_tokens=5),
        "bad",
        {"id": "b", "prompt": ["x", "yy"], "max_tokens": 1},
    ]
    lines += [{"id": "c", "prompt": "x" * 5000}]
    job, reported = write_job(tmp_path, lines), list[tuple[int, str]]()
    preparer = LinePreparer(FakeModelInfo(), make_config(), tmp_path)
    found = await check_job(job, preparer, None, lambda number, reason: reported.append((number, reason)))
    assert (found.lines, found.refused, found.requests, found.max_tokens, found.images) == (4, 2, 4, 12, 0)
    assert found.longest == 20 and found.prompt_tokens == 20 + 2 + 3
    assert [number for number, _ in reported] == [2, 4]
    assert reported[0][1].startswith("not JSON") and "more than the context of 4096 tokens" in reported[1][1]
    reported.clear()
    found = await check_job(job, preparer, 1, lambda number, reason: reported.append((number, reason)))
    assert (found.lines, found.refused, reported) == (1, 0, [])
    assert [path.name for path in tmp_path.iterdir()] == ["job.jsonl"]


async def test_chats_need_a_template(tmp_path: Path) -> None:
    """A job of chats alone is refused at once by a model without one; a prompt among them is enough."""
    model_info = FakeModelInfo(chat_template=None)
    for lines, is_refused in (
        ([chat("a", "x"), "bad"], True),
        ([chat("a", "x"), {"id": "b", "prompt": "x"}], False),
    ):
        index = LineIndex(write_job(tmp_path, lines), LineKeys("", tmp_path, 0))
        index.scan()
        check_chats(index, FakeModelInfo(), len(lines))
        if is_refused:
            with pytest.raises(JobError, match="nothing was run: its requests are chats"):
                check_chats(index, model_info, len(lines))
        else:
            check_chats(index, model_info, len(lines))
        index.close()


async def test_answers_of_all_turns_are_counted(tmp_path: Path) -> None:
    """The prompts of later turns are not known before; their answers are bounded."""
    preparer = LinePreparer(FakeModelInfo(), make_config(), tmp_path)
    for agent, most in ({"max_turns": 7}, 35), ({}, 100):
        line = {**chat("a", "hello", max_tokens=5), "agent": {"tools": ["t.py:f"], **agent}}
        (tmp_path / "t.py").write_text("def f() -> str:\n    return ''\n")
        found = await check_job(write_job(tmp_path, [line]), preparer, None, lambda number, reason: None)
        assert (found.requests, found.max_tokens) == (1, most)


async def test_tools_are_loaded_and_counted(tmp_path: Path) -> None:
    """A line without tools in its body has those that it names; each set of them is loaded once."""
    code = "open('loads', 'a').write('x')\n\ndef f(fruit: str) -> str:\n    return ''\n"
    (tmp_path / "t.py").write_text(code.replace("'loads'", repr(str(tmp_path / "loads"))))
    preparer, reported = LinePreparer(FakeModelInfo(), make_config(), tmp_path), list[tuple[int, str]]()
    lines: list[dict[str, object]] = [
        {**chat(f"{name}-{at}", "hello"), "agent": {"tools": [f"t.py:{name}"], "state": {"at": at}}}
        for name in "fg"
        for at in range(2)
    ]
    job = write_job(tmp_path, lines)
    found = await check_job(job, preparer, None, lambda number, reason: reported.append((number, reason)))
    assert [number for number, _ in reported] == [3, 4]
    assert all("has no function 'g'" in reason for _, reason in reported)
    alone = await check_job(write_job(tmp_path, [chat("a", "hello")]), preparer, None, lambda *_: None)
    assert (found.refused, alone.refused) == (2, 0)
    assert found.longest > alone.longest + 10 and (tmp_path / "loads").read_text() == "xx"
    alien = LinePreparer(FakeModelInfo(), make_config(), None)  # that of a server, which runs no such code
    assert (await check_job(write_job(tmp_path, lines), alien, None, lambda *_: None)).refused == 0
    assert (tmp_path / "loads").read_text() == "xx"
