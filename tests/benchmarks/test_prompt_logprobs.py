"""`python -m benchmarks prompt-logprobs`: the items, and a small run of both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import prompt_logprobs
from benchmarks.__main__ import command


def test_items_share_a_context_and_have_four_choices() -> None:
    items = prompt_logprobs.make_items(5, 300, 0)
    contexts = {item.question[: prompt_logprobs.CONTEXT] for item in items}
    assert len(contexts) == 1 and len({item.question for item in items}) == 5
    for item in items:
        assert len(item.answers) == 4 and all(1 <= len(answer) <= 8 for answer in item.answers)
        assert 30 <= len(item.question) - prompt_logprobs.CONTEXT <= 70
    assert prompt_logprobs.make_items(5, 300, 0) == items != prompt_logprobs.make_items(5, 300, 1)


@pytest.mark.slow
def test_both_sides_give_the_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "CONTEXT", 60)
    out = tmp_path / "report.json"
    given = ["prompt-logprobs", "--model", "tiny", "--scale", "0.01", "--repeat", "1", "--json", str(out)]
    done = CliRunner().invoke(command, given, standalone_mode=False)
    assert done.exception is None, done.output
    assert "mlx_lm.evaluate's method" in done.output
    part = json.loads(out.read_text())["workloads"]["prompt-logprobs"]
    assert part["items"] == {"mlx-lm": 2, "mlxrun": 10}
    assert part["largest_difference"] < 1e-4
    assert part["memory_ratio"] < 1.2
