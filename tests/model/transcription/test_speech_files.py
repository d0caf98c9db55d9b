from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.transcription import speech_files
from mlxrun.model.transcription.speech_files import read_speech_model
from tests.helpers.whisper_models import write_whisper


def test_the_info_of_a_whisper_says_that_it_transcribes(tmp_path: Path) -> None:
    info = load_model_info(ModelSettings(path=str(write_whisper(tmp_path / "tiny"))))
    assert info.speech is not None
    assert not info.generates
    assert (info.vision, info.pooled, info.speech.rate) == (False, None, 16_000)


@pytest.mark.parametrize(
    ("size", "count"), [(51_864, 0), (51_865, 99), (51_866, 100), ({"vocab_size": 51_865}, 99)]
)
def test_languages_are_those_of_the_vocabulary(size: int | dict[str, int], count: int) -> None:
    config = {"model_type": "whisper", **(size if isinstance(size, dict) else {"n_vocab": size})}
    found = read_speech_model(Path("any"), config, ModelSettings())
    assert found is not None
    assert len(found.languages) == count
    assert ("yue" in found.languages) == (count == 100)


def test_other_models_do_not_transcribe() -> None:
    assert read_speech_model(Path("any"), {"model_type": "llama"}, ModelSettings()) is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (ModelSettings(kind="text"), "model.kind: text, but any transcribes sound"),
        (ModelSettings(dtype="bfloat16"), "model.dtype: .* float16 or float32"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: ModelSettings, text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        read_speech_model(Path("any"), {"model_type": "whisper"}, settings)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_files, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"needs mlx-audio: pip install 'mlxrun\[audio\]'"):
        read_speech_model(Path("any"), {"model_type": "whisper"}, ModelSettings())


def test_adapters_of_a_whisper_are_refused(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"model.adapters: encoders and models that transcribe"):
        load_model_info(ModelSettings(path=str(folder), adapters={"a": "b"}))
