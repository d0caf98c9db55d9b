"""Files that an index names and that are not there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load import model_digests
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load.tensor_files import check_shards
from tests.helpers.model_fixtures import Zoo

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def write_shards(folder: Path, *files: str, **places: str) -> None:
    """An index of where weights are, and files with those that it names for them."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file in files:
        named = {name: mx.zeros((1,)) for name, place in places.items() if place == file}
        mx.save_safetensors(str(folder / file), named)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, FIRST, SECOND, a=FIRST, b=SECOND)
    check_shards(tmp_path)
    (tmp_path / SECOND).unlink()
    said = f"{SECOND}, named in model.safetensors.index.json, is missing: an incomplete download?"
    with pytest.raises(ModelLoadError, match=said):
        check_shards(tmp_path)
    (tmp_path / FIRST).unlink()
    with pytest.raises(ModelLoadError, match=f"{FIRST} and 1 more, named in .*, are missing"):
        check_shards(tmp_path)


def test_an_index_of_another_checkpoint_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All weights are there, in a file of another name, or the index is no index at all."""
    write_shards(tmp_path, a=FIRST, b=FIRST)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((1,)), "b": mx.zeros((1,))})
    with caplog.at_level(logging.WARNING):
        check_shards(tmp_path)
    assert f"{FIRST}, named in model.safetensors.index.json, is missing, but the other files" in caplog.text
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    check_shards(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    write_shards(tmp_path, a=FIRST)
    with pytest.raises(ModelLoadError, match="header of the weights cannot be used"):
        check_shards(tmp_path)


def test_a_model_is_refused_before_its_files_are_read(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in zoo.text("llama").iterdir():
        (folder / file.name).symlink_to(file)
    write_shards(folder, a=SECOND)
    read = Mock(side_effect=AssertionError("files were read"))
    monkeypatch.setattr(model_digests, "compute_digests", read)
    with pytest.raises(ModelLoadError, match="an incomplete download"):
        load_model_info(ModelSettings(path=str(folder)), weights=True)
