"""The lines as JSON inside a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxrun.evals.reports import page
from mlxrun.evals.reports.page import build_chunks, build_head, dump_json
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.report_jobs import HOSTILE, mixed_lines, read_lines, run_lines


def read_text(value: Any, texts: list[str]) -> Any:
    return texts[value] if isinstance(value, int) else value


def test_json_stays_inside_its_element() -> None:
    for text in (*HOSTILE, "\ud800 alone"):
        dumped = dump_json({"text": text})
        assert not set(dumped) & set("<>&\u2028\u2029")
        dumped.encode()
        assert json.loads(dumped) == {"text": text}


async def test_the_columns(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", mixed_lines())
    second = await run_lines(tmp_path / "b", mixed_lines()[:2])
    runs = read_runs([first.paths.out, second.paths.out])
    head = build_head(runs.rows, ["a", "b"], runs.tasks)
    columns = head["columns"]
    assert (head["count"], head["groups"], head["tasks"]) == (6, ["a", "b"], [""])
    assert columns["ids"] == ["right", "wrong", "cut", "failed", "free", "line 6"]
    assert columns["groups"] == [0, 0, 1, 1, -1, -1]
    assert columns["marks"] == ["cc", "ww", "c-", "f-", "u-", "f-"]
    assert columns["flags"] == ["00", "00", "10", "00", "00", "00"]
    assert columns["expected"][0] == "yes" and columns["answers"][0].startswith("yes")
    assert build_head(runs.rows[:0], [], [])["count"] == 0
    assert "not JSON" in columns["answers"][5], "a failed line shows its error"


async def test_chunks_have_all_lines_and_shared_texts_once(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer with one word, and be careful. " * 5}
    lines = []
    for at in range(page.CHUNK + 20):
        line = chat(f"line-{at}", f"say {at}")
        line["body"]["messages"].insert(0, system)
        lines.append(line)
    runs = await read_lines(tmp_path, lines)
    chunks = [json.loads(chunk) for chunk in build_chunks(runs.rows, 1)]
    assert [len(chunk["rows"]) for chunk in chunks] == [page.CHUNK, 20]
    for chunk in chunks:
        assert chunk["texts"] == [system["content"]]
    for at, row in enumerate(row for chunk in chunks for row in chunk["rows"]):
        assert [read_text(text, [system["content"]]) for _, text, _ in row["prompt"]] == [
            system["content"],
            f"say {at}",
        ]
        assert row["runs"][0]["answer"].startswith(f"say {at}")


async def test_texts_are_whole_only_if_wanted(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, [chat("a", "long " * 3000)])
    for full in (False, True):
        runs = read_runs([bench.job], full=full)
        (chunk,) = build_chunks(runs.rows, 1)
        prompt = json.loads(chunk)["rows"][0]["prompt"][0][1]
        assert (prompt == "long " * 3000) is full
        assert full or prompt[1] == 15_000 - 6000


async def test_a_line_that_changed_has_no_prompt(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(2))
    bench.job.unlink()
    runs = read_runs([bench.paths.out])
    (chunk,) = build_chunks(runs.rows, 1)
    assert [row["prompt"] for row in json.loads(chunk)["rows"]] == [None, None]
