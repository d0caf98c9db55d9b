"""The whole way with a real engine: a job alone, together and in another order gives the same records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_fakes import by_id, chat, write_job

from mlxrun.cli.main import main


def test_alone_together_and_in_another_order(
    tmp_path: Path, zoo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """C8, A68: greedy and seeded lines, chat and raw prompts, several choices, a bad line among them."""
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
