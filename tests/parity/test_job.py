"""A job with a real engine: line by line, together and in another order gives the same records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.partial_answers import PartialAnswer, PartialAnswers, parse_records
from tests.helpers.batch_fakes import by_id, chat, write_job


def test_alone_together_and_in_another_order(
    tmp_path: Path, zoo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy and seeded lines, chat and raw prompts, several choices, a bad line among them."""
    lines: list[Any] = [
        chat(f"c{i}", "hello " * (1 + i * i), max_tokens=12, temperature=i % 2) for i in range(10)
    ]
    lines += [{"id": "raw", "prompt": ["abc", "de"], "n": 2, "max_tokens": 6}, "bad"]
    model = f"model.path={zoo.text('llama')}"
    found = []
    for name, rows, order in (("alone", 1, 1), ("together", 16, 1), ("turned", 16, -1)):
        job = write_job(tmp_path, lines[::order], f"{name}.jsonl")
        assert main(["batch", str(job), "--set", model, "--set", f"scheduler.max_running={rows}"]) == 1
        found.append(by_id(tmp_path / f"{name}.out.jsonl"))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 11
    assert "11 of 12 lines done" in capsys.readouterr().out


@pytest.mark.parametrize("most", [1, 5, 11])
def test_partial_answers_go_on(
    tmp_path: Path, zoo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], most: int
) -> None:
    """The engine goes on from known tokens, sampled ones too, to the bytes of an uninterrupted run."""
    lines = [
        chat(f"c{i}", "hello " * (1 + i), max_tokens=12, temperature=i % 2, **({"n": 2} if i > 3 else {}))
        for i in range(6)
    ]
    args = ["--set", f"model.path={zoo.text('llama')}", "--set", "batch.order=input"]
    with monkeypatch.context() as patch:
        for name in ("remove_line", "delete_file"):
            patch.setattr(PartialAnswers, name, lambda *args: None)
        assert main(["batch", str(write_job(tmp_path, lines, "full.jsonl")), *args]) == 0
    full = JobPaths(tmp_path / "full.jsonl")
    paths = JobPaths(write_job(tmp_path, lines))
    paths.folder.mkdir()
    with full.answers.open("rb") as file:
        found = [
            (key, i, each) for key, choices in parse_records(file).items() for i, each in choices.items()
        ]
    partial = [(key, i, PartialAnswer(each.request_digest, each.tokens[:most])) for key, i, each in found]
    paths.answers.write_bytes(b"".join(each.take_record(key, i) for key, i, each in partial))
    assert main(["batch", str(paths.job), *args]) == 0
    assert "6 partial answers of the last run" in capsys.readouterr().err
    assert paths.out.read_bytes() == full.out.read_bytes()
