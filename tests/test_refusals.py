"""What cannot go well is refused before anything runs: damaged weights, little memory, odd outputs, bombs."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from fixtures_models import Zoo

from mlxrun.batch.paths import Paths
from mlxrun.config.loader import load_config
from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings
from mlxrun.engine.build import build_engine
from mlxrun.errors import ConfigError, JobError, ModelLoadError


def test_weights_that_compute_nan(zoo: Zoo, tmp_path: Path) -> None:
    """A model that can only answer nonsense does not load."""
    folder = tmp_path / "damaged"
    shutil.copytree(zoo.text("llama"), folder)
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(ModelLoadError, match="NaN"):
        build_engine(Config(model=ModelSettings(path=str(folder))))


def test_a_memory_limit_below_the_weights(zoo: Zoo) -> None:
    config = Config(
        model=ModelSettings(path=str(zoo.text("llama"))), scheduler=SchedulerSettings(memory_limit=10_000)
    )
    with pytest.raises(ConfigError, match=r"scheduler\.memory_limit: weights .* nothing could ever run"):
        build_engine(config)


def test_an_output_that_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not a regular file"):
        Paths.of(tmp_path / "j.jsonl", Path("/dev/null"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 5000, "nested too deeply"),
        (
            "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
            "too many values",
        ),
    ],
)
def test_yaml_that_is_an_attack(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file, (), {})
