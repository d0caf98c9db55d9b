"""Loads the model of `model.draft`, for sparse prefill or for speculation, and refuses what does not fit.

Its files are checked first (`load_draft_info`), before the large model is loaded that it is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ConfigError, MlxrunError
from mlxrun.model.load.loader import load_adapter
from mlxrun.model.load.model_files import make_draft_error, make_draft_settings
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info, log_weights
from mlxrun.model.run.adapter import Adapter, run_trial_forward


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


def load_draft_info(settings: ModelSettings, model_info: LoadedModelInfo) -> LoadedModelInfo:
    """The model of `model.draft` without its weights. ConfigError if its files show that it cannot be loaded,
    or does not fit the model of `model_info`, which has these settings."""
    try:
        info = load_model_info(make_draft_settings(settings), weights=True, announce=False, digest=False)
    except MlxrunError as error:
        raise make_draft_error(error) from error
    problem = _compare_vocabularies(model_info.tokenizer, info.tokenizer)
    if problem is not None:
        raise ConfigError(f"model.draft: {settings.draft} {problem}")
    return info


def load_small_model(config: Config, model_info: LoadedModelInfo, draft: LoadedModelInfo) -> SmallModel:
    """The model of `draft`, which is for that of `model_info`. ConfigError if it cannot be loaded."""
    own = make_draft_settings(config.model)
    log_weights(own, draft.folder)
    try:
        adapter = load_adapter(replace(config, model=own), draft)
        cache, width = run_trial_forward(adapter)
    except MlxrunError as error:
        raise make_draft_error(error) from error
    model = SmallModel(adapter, draft, cache, width)
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
