"""`mlxrun history`: notes runs, draws their trend, and fails on conditions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import chats
from tests.helpers.eval_runs import run_lines

pytestmark = pytest.mark.thorough


async def test_a_nightly_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, job = tmp_path / "nightly.jsonl", str(await run_lines(tmp_path / "a", chats(6)))
    assert main(["history", str(path), job]) == 0
    out = capsys.readouterr().out
    assert (
        "job.out.jsonl" in out and "100.0 % [61.0, 100.0]" in out and "too few runs to tell (1 of 5)" in out
    )
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    earlier = [json.dumps({**row, "time": f"night {at}"}) + "\n" for at in range(4)]
    worse = json.dumps({**row, "value": 0.5, "time": "today"}) + "\n"
    path.write_text("".join([*earlier, worse]))
    assert main(["history", str(path), "--fail-if", "jump", "--fail-if", "drift"]) == 1
    shown = capsys.readouterr()
    assert "████▁" in shown.out and "-50.0 points" in shown.out
    assert shown.err == (
        "mlxrun: --fail-if job.out.jsonl: jump: 50.0 % is worse than was to be expected, [100.0, 100.0]\n"
    )
    assert main(["history", str(path), "--html", str(tmp_path / "trend.html")]) == 0
    assert '<path class="line"' in (tmp_path / "trend.html").read_text()
    capsys.readouterr()
    assert main(["history", str(path), "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    assert cell["values"] == [1.0] * 4 + [0.5] and cell["jump"] and not cell["drift"]


async def test_failed_lines_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nightly.jsonl"
    lines = [line | {"body": line["body"] | {"max_tokens": 10**9}} for line in chats(6)]
    job = str(await run_lines(tmp_path / "a", lines))
    assert main(["history", str(path), job]) == 0
    out = capsys.readouterr().out
    assert "; 6 lines failed" in out and out.endswith(f"{path}: 1 row added, 0 already there\n")
    assert main(["history", str(path), job]) == 0
    assert capsys.readouterr().out.endswith(f"{path}: 0 rows added, 1 already there\n")
    assert main(["history", str(path), job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["added"], found["already_there"]) == (0, 1) and found["cells"][0]["failed"] == [6]


def test_no_history_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(tmp_path / "x.jsonl")]) == 2
    assert "is no history yet" in capsys.readouterr().err
