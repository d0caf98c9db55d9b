"""The facts in a model's files about transcription. Loads no mlx."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.transcription import SpeechModel

WHISPER_RATE = 16_000
_MULTILINGUAL = 51_865  # tokens; English-only models of Whisper have fewer


def read_speech_model(folder: Path, config: Mapping[str, Any], settings: ModelSettings) -> SpeechModel | None:
    """What the model takes, None if it does not transcribe. ModelLoadError if it cannot be loaded with these
    settings, or if mlx-audio is missing."""
    if config.get("model_type") != "whisper":
        return None
    if settings.kind != "auto":
        raise ModelLoadError(f"model.kind: {settings.kind}, but {folder} transcribes sound (whisper)")
    if settings.dtype == "bfloat16":
        raise ModelLoadError("model.dtype: mlx-audio computes Whisper in float16 or float32 only")
    if find_spec("mlx_audio") is None:
        raise ModelLoadError(f"{folder}: this model needs mlx-audio: pip install 'mlxrun[audio]'")
    from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES

    size = config.get("n_vocab", config.get("vocab_size", _MULTILINGUAL))
    count = size - _MULTILINGUAL + 99 if size >= _MULTILINGUAL else 0  # as the library counts them
    languages = dict(list(LANGUAGES.items())[:count])
    return SpeechModel(
        WHISPER_RATE, languages, config.get("n_text_ctx") or config.get("max_target_positions", 448)
    )
