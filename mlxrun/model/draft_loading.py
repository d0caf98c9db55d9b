"""Loads the model of `model.draft`, for sparse prefill or for speculation, and refuses what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.errors import ConfigError, MlxrunError, ModelLoadError
from mlxrun.model.adapter import Adapter, run_trial_forward
from mlxrun.model.loader import load_adapter
from mlxrun.model.model_files import find_model_folder, list_weight_files, read_json
from mlxrun.model.model_info import LoadedModelInfo, load_model_info, make_draft_settings
from mlxrun.model.pooling.encoder_types import is_encoder
from mlxrun.model.shard_check import check_shards
from mlxrun.model.tokenizer_files import load_tokenizer


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A loaded draft model. `cache`: of two tokens, for its shapes; `width`: of its logits."""

    adapter: Adapter
    info: LoadedModelInfo
    cache: list[Any]
    width: int

    def make_error(self, problem: str) -> ConfigError:
        """That this model cannot be used, for a reason that has it as its subject."""
        return ConfigError(f"model.draft: {self.info.name} {problem}")


def check_draft_files(settings: ModelSettings, model_info: LoadedModelInfo) -> None:
    """ConfigError if the files of `model.draft` show, without weights, that it does not fit this model."""
    own = make_draft_settings(settings)
    try:
        folder = find_model_folder(own, weights=True)
        if folder.is_file():
            return  # GGUF: its one file is read when it is loaded
        if not list_weight_files(folder):
            raise ModelLoadError(f"no *.safetensors in {folder}: the model has no weights")
        check_shards(folder)
        draft = read_json(folder / "config.json")
        if is_encoder(draft):
            raise ConfigError(f"{folder} is an encoder ({draft['model_type']}), which predicts no tokens")
        problem = _compare_vocabularies(model_info.tokenizer, load_tokenizer(folder, own))
        if problem is not None:
            raise ConfigError(f"{settings.draft} {problem}")
    except MlxrunError as error:
        raise ConfigError(f"model.draft: {error}") from error


def load_small_model(config: Config, model_info: LoadedModelInfo) -> SmallModel:
    """The model of `model.draft`. ConfigError if it cannot be loaded, or has another vocabulary."""
    own = make_draft_settings(config.model)
    try:
        info = load_model_info(own, weights=True)
        problem = _compare_vocabularies(model_info.tokenizer, info.tokenizer)
        if problem is not None:
            raise ConfigError(f"{info.name} {problem}")
        adapter = load_adapter(replace(config, model=own), info)
        cache, width = run_trial_forward(adapter)
    except MlxrunError as error:
        raise ConfigError(f"model.draft: {error}") from error
    model = SmallModel(adapter, info, cache, width)
    if width <= max(model_info.tokenizer.get_vocab().values()):
        raise model.make_error(f"has logits of {width} tokens, and the tokenizer more")
    return model


def _compare_vocabularies(target: Any, draft: Any) -> str | None:
    """Why the same ids are not the same tokens for both models' tokenizers."""
    mine, other = target.get_vocab(), draft.get_vocab()
    differing = sorted(token for token in mine.keys() | other.keys() if mine.get(token) != other.get(token))
    if not differing:
        return None
    return f"has another vocabulary: {len(differing)} tokens differ, such as {differing[0]!r:.40}"
