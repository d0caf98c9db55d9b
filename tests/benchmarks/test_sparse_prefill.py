"""`python -m benchmarks sparse-prefill` and `sparse-recall`: small runs, of which no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import command
from benchmarks.sparse_recall import make_prompt
from mlxrun.cli.bench.models import PRESETS, write_chat_model
from mlxrun.core.errors import ConfigError


def run(out: Path, *given: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, [*given, "--json", str(out)], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return dict(json.loads(out.read_text())["workloads"])


def test_both_sides_compute_what_they_should(tmp_path: Path) -> None:
    given = ("sparse-prefill", "--scale", "0.05", "--repeat", "1", "--keep", "0.3")
    found = run(tmp_path / "report.json", *given)["sparse-prefill"]
    assert found["prompt_tokens"] == 819 and 0.25 < found["computed_tokens"] / 819 < 0.4
    (sparse,), (whole,) = found["runs"]["sparse"], found["runs"]["whole"]
    assert whole["computed"] == 819 and whole["choosing"] == 0 < sparse["choosing"] < sparse["seconds"]


def test_a_draft_with_another_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--draft .*: has .* tokens, and .* 1024"):
        run(tmp_path / "report.json", "sparse-prefill", "--draft", "embedded")


def test_answers_are_counted(tmp_path: Path) -> None:
    write_chat_model(tmp_path / "model", PRESETS["tiny"])
    model = str(tmp_path / "model")
    given = ("--model", model, "--draft", model, "--sentences", "20", "--prompts", "1", "--keep", "0.5")
    keep = run(tmp_path / "report.json", "sparse-recall", *given)["sparse-recall"]["keep"]
    assert set(keep) == {"whole", "0.5"} and keep["0.5"]["tokens"] < 0.8 * keep["whole"]["tokens"]


def test_a_prompt_says_the_word_once_in_some_place() -> None:
    found = [make_prompt(50, seed) for seed in range(20)]
    assert all(each.text.count(f" is {each.word}.") == 1 for each in found)
    assert len({each.text.index(each.word) // 500 for each in found}) > 2
