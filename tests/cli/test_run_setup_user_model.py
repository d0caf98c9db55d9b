"""The model that plays the user beside the model of a job: its part of the memory, and where it is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlxrun.model
from mlxrun.cli.main import main
from mlxrun.cli.ray_setup import run_on_ray
from mlxrun.cli.run_setup import share_memory_limit
from mlxrun.config.loading import load_config
from mlxrun.config.settings import Config, EngineSettings, SchedulerSettings
from mlxrun.core.errors import ConfigError
from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.batch_fakes import write_job

MODEL = Path(mlxrun.model.__file__).parent / "embedded/model"
SUITE = """\
models: {tiny: {set: {engine.reproducible: true, engine.load_check: false}}}
tasks:
  talk:
    rows: [{a: 3}]
    prompt: "Say exactly this: {{ a }}"
    judge: later
    generation: {max_tokens: 6, temperature: 0}
    agent: {max_turns: 2, user: {prompt: Say hello., model: ./ann, generation: {max_tokens: 4}}}
"""


def make_model(folder: Path, size: int) -> SimpleNamespace:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(size))
    return SimpleNamespace(folder=folder)


def test_memory_is_shared_by_size(tmp_path: Path) -> None:
    """In reproducible mode only if the config has a limit, as free memory would decide what is computed."""
    own, other = make_model(tmp_path / "own", 300), make_model(tmp_path / "other", 100)
    config = Config(scheduler=SchedulerSettings(memory_limit=1000))
    limits = [
        share_memory_limit(config, *pair).scheduler.memory_limit for pair in ((own, other), (other, own))
    ]
    assert limits == [750, 250]
    free = [
        share_memory_limit(Config(), *pair).scheduler.memory_limit for pair in ((own, other), (other, own))
    ]
    assert free[0] == pytest.approx(3 * (free[1] or 0), rel=0.2)
    fixed = Config(engine=EngineSettings(reproducible=True))
    assert share_memory_limit(fixed, own, other) == fixed
    limited = replace(fixed, scheduler=config.scheduler)
    assert share_memory_limit(limited, own, other).scheduler.memory_limit == 750


def test_a_run_is_verified_where_the_user_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODEL, tmp_path / "ann")
    (tmp_path / "suite.yaml").write_text(SUITE)
    assert main(["eval", str(tmp_path / "suite.yaml")]) == 0
    folder = tmp_path / "suite.out/tiny/talk/seed-0"
    record = json.loads((folder / "job.out.jsonl").read_text())
    assert [each["role"] for each in record["transcript"]] == ["assistant", "user", "assistant"]
    shutil.move(tmp_path / "ann", tmp_path / "bob")
    assert main(["verify", str(folder)]) == 2
    assert f"batch.user_model: there is no folder {tmp_path}/ann" in capsys.readouterr().err
    assert main(["verify", str(folder), "--user-model", str(tmp_path / "bob")]) == 0
    assert "1 equal, 0 different" in capsys.readouterr().out
    template = tmp_path / "bob/chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    assert main(["verify", str(folder), "--user-model", str(tmp_path / "bob")]) == 2
    assert "user.model.template" in capsys.readouterr().err


def test_a_dry_run_counts_the_memory_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model has its part of the limit. The twin: a job without a user has all of it."""
    shutil.copytree(MODEL, tmp_path / "ann")
    user = {"user": {"prompt": "Say hello."}, "max_turns": 2}
    line = {"id": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "agent": user}
    job = write_job(tmp_path, [line])
    dry = ["batch", str(job), "--dry-run", "--set", "scheduler.memory_limit=1GB"]
    assert main([*dry, "--set", f"batch.user_model={tmp_path}/ann"]) == main(dry) == 0
    both = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    starts = ("memory: fits: ", f"memory of {tmp_path}/ann, which plays the user: fits: ", "memory: fits: ")
    assert all(each.startswith(start) for each, start in zip(both, starts, strict=True)), both
    assert ["of the 475.0 MB that" in each for each in both] == [True, True, False], both
    (tmp_path / "suite.yaml").write_text(SUITE)
    assert main(["eval", str(tmp_path / "suite.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "memory: embedded has " in out and f"memory: {tmp_path}/ann has " in out


async def test_workers_on_ray_have_one_model_each(tmp_path: Path) -> None:
    """It is said before Ray is looked for."""
    loaded = load_config(None, ["batch.user_model=embedded"])
    with pytest.raises(ConfigError, match="batch.user_model: workers on Ray have one model each"):
        async with run_on_ray("ray://nowhere", loaded, JobPaths(tmp_path / "job.jsonl"), mixed=False):
            pass
