"""What differs between two runs beside their answers is read from their manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import SamplingSettings
from mlxrun.evals.comparisons.comparison import compare_paths
from tests.helpers.batch_fakes import Bench, write_job
from tests.helpers.eval_runs import run_lines, sampled_chats
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo


def edit_manifest(job: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a run."""
    folder = job.with_name("job.out.jsonl.run")
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda found: found["versions"].update(mlx="9.9"), ["mlx is 9.9, was {mlx}"]),
        (lambda found: found["device"].update(name="other"), ["the device is other, was fake"]),
        (
            lambda found: found.update(mixed=True),
            ["the second run has answers of several versions or devices"],
        ),
        (
            lambda found: found.update(scoring={"scorer": "m:f", "scorers": {"m:f": "00"}}),
            ['scoring.scorer is "m:f", was null', "the scorer m:f has changed"],
        ),
        (lambda found: found["seeds"].update(base=7), ["the base of the seeds is 7, was 0"]),
    ],
)
async def test_versions_devices_and_seeds(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], wanted: list[str]
) -> None:
    jobs = [await run_lines(tmp_path / name, sampled_chats(3)) for name in "ab"]
    assert compare_paths(*jobs).comparisons[0].differences == []
    manifest = json.loads((tmp_path / "a" / "job.out.jsonl.run" / "manifest.json").read_text())
    edit_manifest(jobs[1], change)
    [found] = compare_paths(*jobs).comparisons
    assert found.differences == [each.format(mlx=manifest["versions"]["mlx"]) for each in wanted]


async def test_what_differs_between_judges_is_named(tmp_path: Path) -> None:
    first, second = [await run_lines(tmp_path / name, sampled_chats(3)) for name in "ab"]
    judge = {"template": {"prompt": "x" * 60}, "job": "judge/job.jsonl"}
    judge |= {"output_sha256": "00", "settings_sha256": "00", "model": {"path": "a", "fingerprint": "00"}}
    edit_manifest(first, lambda found: found.update(scoring={"scorers": {"judge": "00"}, "judge": judge}))
    other = {"judge": judge | {"output_sha256": "11"}, "scorers": {"judge": "11"}}
    edit_manifest(second, lambda found: found.update(scoring=other))
    assert compare_paths(first, second).comparisons[0].differences == []  # only its verdicts are others
    changes = {"template": {"prompt": "x" * 60 + "y", "verdict": {"after": "V"}}, "settings_sha256": "11"}
    other = {"judge": judge | changes | {"model": {"path": "b", "fingerprint": "11"}}}
    edit_manifest(second, lambda found: found.update(scoring=other))
    assert compare_paths(first, second).comparisons[0].differences == [
        "the model of the judge has changed",
        "the settings of the judge have changed",
        "scoring.judge.template.prompt has changed",
        'scoring.judge.template.verdict.after is "V", was null',
    ]


async def test_values_that_begin_alike_are_not_shown_as_equal(tmp_path: Path) -> None:
    first, second = [await run_lines(tmp_path / end, sampled_chats(3, stop=["x" * 60 + end])) for end in "ab"]
    assert compare_paths(first, second).comparisons[0].differences == ["`stop` of 3 lines has changed"]


async def test_settings_of_the_config_and_of_bodies(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", sampled_chats(3, temperature=0.5))
    second = await run_lines(tmp_path / "b", sampled_chats(3, temperature=0.7), seed=3)
    [found] = compare_paths(first, second).comparisons
    assert found.differences == [
        "sampling.seed is 3, was 0",
        "the base of the seeds is 3, was 0",
        "`temperature` of 3 lines is 0.7, was 0.5",
    ]


async def test_another_model_has_another_template(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", sampled_chats(3))
    (tmp_path / "b").mkdir()
    bench = Bench(write_job(tmp_path / "b", sampled_chats(3)))
    bench.config = replace(bench.config, model=replace(bench.config.model, path="models/b"))
    bench.config = replace(bench.config, sampling=SamplingSettings(seed=0))
    bench.model_info = FakeModelInfo(digests={**DIGESTS, "model": "00", "template": "11"})
    await bench.run()
    [found] = compare_paths(first, bench.job).comparisons
    assert len(found.differences) == 2 and found.differences[0].startswith("model.path is models/b, was ")
    assert found.differences[1] == "the chat template is another one"
