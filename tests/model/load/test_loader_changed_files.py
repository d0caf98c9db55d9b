"""Weights are those of the digests by which caches and jobs know a model, or it is not loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.engine.build import build_engine
from mlxrun.engine.engine import Engine
from mlxrun.model.load import loader
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.pooling.build import build_encoder_runner
from mlxrun.model.transcription.whisper import load_whisper
from tests.helpers import engine_driver, pooling_models, text_models, whisper_models
from tests.helpers.model_fixtures import Zoo

Patch = pytest.MonkeyPatch
PROMPT = text_models.prompts(0, (70,))[0]
WEIGHTS = "model.safetensors"
REFUSED = "its files were changed after .* start again"


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    return shutil.copytree(zoo.text("llama"), tmp_path / "model")


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Weights of another model with the same config, and of the same size."""
    return text_models.build("llama", tmp_path / "others", 77) / WEIGHTS


def save_over(folder: Path, source: Path) -> None:
    """As a training run saves its next checkpoint: under the same name, and with the times of the source."""
    shutil.copy2(source, folder / WEIGHTS)


def make_engine(folder: Path, info: Any = None, **options: Any) -> Engine:
    return build_engine(engine_driver.make_config(folder, load_check=False, **options), info)


def answer(engine: Engine) -> np.ndarray:
    request = engine_driver.make_text_request("r", PROMPT, max_tokens=4)
    event = engine_driver.run_requests(engine, [request])["r"]
    engine.prefix_cache.shutdown()
    return engine_driver.list_logprobs(event)


def test_entries_on_disk_are_of_the_weights_of_their_digest(
    folder: Path, others: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The twin loads the other weights, and keeps what they compute for a later start with the first ones."""
    disk = {"backend": "disk", "disk_path": str(tmp_path / "entries")}
    cold, first = answer(make_engine(folder, backend="none")), tmp_path / "first.safetensors"
    shutil.copy2(folder / WEIGHTS, first)
    for is_checked in (True, False):
        if not is_checked:
            monkeypatch.setattr(loader, "check_digests", lambda settings, info: None)
        info = load_model_info(ModelSettings(path=str(folder)), weights=True)
        save_over(folder, others)
        if is_checked:
            with pytest.raises(ModelLoadError, match=REFUSED):
                make_engine(folder, info, **disk)
        else:
            answer(make_engine(folder, info, **disk))
        save_over(folder, first)
        found = answer(make_engine(folder, **disk))
        assert np.allclose(found, cold, atol=1e-4) == is_checked
        shutil.rmtree(tmp_path / "entries")


def test_weights_that_change_while_they_are_read(folder: Path, others: Path, monkeypatch: Patch) -> None:
    real = loader.evaluate_parameters

    def read(*given: Any) -> None:
        real(*given)
        save_over(folder, others)

    monkeypatch.setattr(loader, "evaluate_parameters", read)
    with pytest.raises(ModelLoadError, match=REFUSED):
        make_engine(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_each_file_counts_by_its_content(folder: Path, name: str) -> None:
    """Other times alone do no harm, such as those of a file that was copied onto itself."""
    settings = ModelSettings(path=str(folder))
    info = load_model_info(settings, weights=True)
    os.utime(folder / name, ns=(1, 1))
    loader.check_digests(settings, info)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(ModelLoadError, match=REFUSED):
        loader.check_digests(settings, info)
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=REFUSED):
        loader.check_digests(settings, info)


def test_encoders_and_models_that_transcribe(tmp_path: Path) -> None:
    def build_encoder(folder: Path) -> Callable[[LoadedModelInfo], Any]:
        pooling_models.build_pooling_model("bert", folder)
        return lambda info: build_encoder_runner(Config(model=ModelSettings(path=str(folder))), info)

    def build_whisper(folder: Path) -> Callable[[LoadedModelInfo], Any]:
        whisper_models.write_whisper(folder)
        return lambda info: load_whisper(ModelSettings(path=str(folder)), info)

    for build in (build_encoder, build_whisper):
        folder = tmp_path / build.__name__
        load = build(folder)
        info = load_model_info(ModelSettings(path=str(folder)), weights=True)
        load(info)
        with (folder / WEIGHTS).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        with pytest.raises(ModelLoadError, match=REFUSED):
            load(info)
