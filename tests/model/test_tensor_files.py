"""A damaged file of weights is named, whatever loads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.engine.factory import build_engine
from mlxrun.errors import ModelLoadError
from tests.helpers.model_fixtures import Zoo
from tests.helpers.pooling_models import build_pooling_model


@pytest.mark.parametrize("size", [0, 5, 3000])
def test_a_file_that_was_cut_is_named(zoo: Zoo, tmp_path: Path, size: int) -> None:
    """Without a header, in it or behind it."""
    encoder = build_pooling_model("bert", tmp_path / "bert")
    for source in (zoo.text("llama"), zoo.vision("qwen2_5_vl"), encoder):
        folder = tmp_path / "cut" / source.name
        shutil.copytree(source, folder)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelLoadError) as caught:
            build_engine(Config(model=ModelSettings(path=str(folder))))
        assert str(caught.value).startswith(f"{file}: ")
