"""Files with headers and no values: what reads headers cannot tell them from the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
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
