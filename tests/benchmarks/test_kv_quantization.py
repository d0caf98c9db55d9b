"""`python -m benchmarks kv-quantization` on the built-in model: fewer bits are fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.__main__ import command

WORDS = "The boat went down the river, and nobody saw it again until the spring. "


def test_fewer_bits_are_farther_from_full_precision(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS * 40)
    sizes = ["--text", str(tmp_path / "text.txt"), "--rows", "2", "--prompt", "40", "--steps", "4"]
    done = CliRunner().invoke(command, ["kv-quantization", *sizes, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text())["workloads"]
    full, eight, four = (found[name] for name in ("full", "8 bits", "4 bits"))
    assert full["bytes_per_token"] > eight["bytes_per_token"] > four["bytes_per_token"] > 0
    assert full["kl_divergence"] == 0 and full["same_token"] == 1
    assert 0 < eight["kl_divergence"] < four["kl_divergence"]
    assert "perplexity" in done.output


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS)
    done = CliRunner().invoke(command, ["kv-quantization", "--text", str(tmp_path / "text.txt")])
    assert "and 4 rows take 1284" in str(done.exception)
