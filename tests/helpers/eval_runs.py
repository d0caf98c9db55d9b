"""Runs on the echoing engine with scores that depend on the seed: an answer ends in two letters of x, y and
z, which are sampled by seed, and scores 1 if it contains an x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.config.settings import SamplingSettings
from tests.helpers.batch_fakes import Bench, chat, make_config, write_job

HAS_X = {"expected": "x", "match": "contains"}


def sampled_chats(count: int, groups: int = 2, **params: Any) -> list[dict[str, Any]]:
    """Lines whose scores are 1 or 0, about as often. `params`: of their bodies."""
    return [
        chat(f"q{at}", f"say {at}", HAS_X | {"group": f"g{at % groups}"}, **params) for at in range(count)
    ]


async def run_lines(
    folder: Path, lines: Sequence[Any], seed: int = 0, name: str = "job.jsonl", **options: Any
) -> Path:
    """Run the lines in `folder`, which is made; the path of the job. `options`: of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(make_config(), sampling=SamplingSettings(seed=seed))
    bench = Bench(write_job(folder, lines, name), config)
    await bench.run(**options)
    return bench.job
