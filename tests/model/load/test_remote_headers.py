"""Files with headers and no values: what reads headers cannot tell them from the real ones."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load import remote_headers
from mlxrun.model.load.remote_headers import open_headers, write_hollow_file
from mlxrun.model.load.tensor_files import read_entries
from tests.helpers.model_fixtures import Zoo


def test_a_hollow_file_has_the_header_and_the_size_of_the_real_one(zoo: Zoo, tmp_path: Path) -> None:
    real = zoo.text("llama") / "model.safetensors"
    entries = read_entries(real)
    made = tmp_path / "model.safetensors"
    write_hollow_file(made, entries)
    assert read_entries(made) == entries
    assert made.stat().st_blocks * 512 < real.stat().st_size / 2, "it takes no space"
    with made.open("r+b") as file:
        file.truncate(made.stat().st_size - 4)
    with pytest.raises(ModelLoadError):
        read_entries(made)


def test_a_folder_is_taken_as_it_is(zoo: Zoo) -> None:
    settings = ModelSettings(path=str(zoo.text("llama")))
    with open_headers(settings) as found:
        assert found is settings


def test_files_in_folders_of_the_model_are_there_too(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sentence-transformers has how to pool; and no weights that no library reads."""
    model, entries = tmp_path / "model", read_entries(zoo.text("llama") / "model.safetensors")
    shutil.copytree(zoo.text("llama"), model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    tensors = {
        name: SimpleNamespace(dtype=e.dtype, shape=e.shape, data_offsets=(e.start, e.stop))
        for name, e in entries.items()
    }
    names = ("model.safetensors", "consolidated.safetensors", "original/model.safetensors")
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(remote_headers, "find_model_folder", lambda *_, **__: model)
    monkeypatch.setattr(remote_headers, "convert_hub_errors", lambda _: nullcontext())
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.parse_safetensors_file_metadata",
        lambda *_, **__: SimpleNamespace(tensors=tensors),
    )
    with open_headers(ModelSettings(path="owner/name")) as settings:
        made = Path(settings.path)
        assert (made / "1_Pooling" / "config.json").read_text() == '{"pooling_mode": "cls"}'
        assert [path.name for path in made.rglob("*.safetensors")] == ["model.safetensors"]
        assert read_entries(made / "model.safetensors") == entries
