"""The pictures of jobs/look.yaml show what their rows expect, and are drawn alike each time."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mlxrun.cli.main import main as run_mlxrun
from tools import visual_eval

LOOK = visual_eval.ROOT / "jobs/look"
TICK = (20, 110, 40)


def test_the_same_code_draws_the_same_pixels(tmp_path: Path) -> None:
    """Bytes of PNG files may differ by the version of zlib, so those of the repository are compared by
    pixels."""
    for name in ("one", "two"):
        visual_eval.write_pictures(tmp_path / name)
    made = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert made == sorted(path.name for path in LOOK.iterdir())
    assert sum(path.stat().st_size for path in LOOK.iterdir()) < 300_000
    for name in made:
        paths = [tmp_path / "one" / name, tmp_path / "two" / name, LOOK / name]
        assert paths[0].read_bytes() == paths[1].read_bytes()
        if name.endswith(".png"):
            first, kept = (np.array(Image.open(path).convert("RGB")) for path in (paths[0], paths[2]))
            assert np.array_equal(first, kept), f"python -m tools.visual_eval draws another {name}"
        else:
            assert paths[0].read_text() == paths[2].read_text()


@pytest.mark.parametrize("seed", range(5))
def test_a_chart_has_the_bar_that_is_asked_for(seed: int) -> None:
    image, row = visual_eval.draw_chart(random.Random(seed))
    month = row["ask_number"].partition(" sold in ")[2].partition("?")[0]
    pixels = np.array(image)
    bars = [95 + at * 88 + 29 for at in range(len(visual_eval.MONTHS)) if 95 + at * 88 + 29 < image.width]
    colour = pixels[419, bars[0]]
    heights = [int((pixels[:420, x] == colour).all(axis=-1).sum()) for x in bars]
    at = visual_eval.MONTHS.index(month)
    assert round(heights[at] / 3.5) == row["number"]
    assert visual_eval.MONTHS[heights.index(max(heights))] == row["name"]


@pytest.mark.parametrize("seed", range(5))
def test_a_screen_has_as_many_ticks_as_expected(seed: int) -> None:
    image, row = visual_eval.draw_screen(random.Random(seed))
    ticked = (np.array(image) == TICK).all(axis=-1)
    assert sum(bool(ticked[200 + at * 42 : 228 + at * 42].any()) for at in range(4)) == row["number"]


def test_a_receipt_adds_up() -> None:
    for seed in range(5):
        _, row = visual_eval.draw_receipt(random.Random(seed))
        assert row["fields"]["total"] == row["number"] > 0 and 3 <= row["fields"]["items"] <= 5


def test_every_row_of_the_suite_can_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = str(visual_eval.ROOT / "jobs/look.yaml")
    assert run_mlxrun(["eval", suite, "--dry-run", "-o", str(tmp_path / "out")]) == 0
    assert f"{7 * visual_eval.COUNT} lines" in capsys.readouterr().out


def test_the_scores_of_a_run_are_kept(tmp_path: Path) -> None:
    cells = [
        {"model": "m", "task": task, "scores": {"total": {"lines": 12, "share": score, "interval": [0, 1]}}}
        for task, score in (("a", 0.5), ("b", 1.0))
    ]
    (tmp_path / "suite.json").write_text(json.dumps({"cells": cells}))
    out = tmp_path / "kept.json"
    assert visual_eval.main(["--keep", str(tmp_path / "suite.json"), "--out", str(out)]) == 0
    kept = json.loads(out.read_text())["scores"]["m"]
    assert kept == {
        "a": {"score": 0.5, "interval": [0, 1], "lines": 12},
        "b": {"score": 1.0, "interval": [0, 1], "lines": 12},
    }
