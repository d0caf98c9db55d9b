"""What a model's files say of its prompts and answers: the chat template, the tokens that end an answer, the
longest context, and values for sampling.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.text_files import read_text_file
from mlxrun.model.load.model_files import read_json

log = logging.getLogger(__name__)
GENERATION = "generation_config.json"
DEFAULT_CONTEXT = 32_768
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_template(folder: Path, settings: ModelSettings, tokenizer: Any) -> str | None:
    """The chat template of the settings, else that of the model's files; None if there is none.
    ModelLoadError if it cannot be read."""
    if settings.chat_template is not None:
        try:
            return read_text_file(Path(settings.chat_template))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelLoadError(f"model.chat_template: {settings.chat_template}: {reason}") from error
    if folder.is_file():
        return tokenizer.chat_template
    own = folder / "chat_template.json"  # older vision models
    where = own if own.is_file() else folder
    found = read_json(own).get("chat_template") if own.is_file() else tokenizer.chat_template
    if isinstance(found, dict):  # several named templates
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelLoadError(f"{where}: chat_template must be a string or named strings, not {found!r:.60}")
    return found


def collect_eos_ids(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Any
) -> frozenset[int]:
    """Every token that one of the model's files in `folder` names as an end token. Logs a warning of a value
    that is none."""
    text = config.get("text_config") or {}
    sources = {GENERATION: generation, "config.json": config, "config.json: text_config": text}
    found: list[Any] = [tokenizer.eos_token_id]
    for name, source in sources.items():
        value = source.get("eos_token_id")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and not isinstance(each, bool):
                found.append(each)
            elif each is not None:
                _warn_of_ignored(folder, name, "eos_token_id", each, "the id of a token")
    return frozenset(i for i in found if isinstance(i, int))


def _warn_of_ignored(folder: Path, file: str, key: str, value: Any, wanted: str) -> None:
    log.warning("%s: %s: %s %.60r is ignored, since it is not %s", folder, file, key, value, wanted)


def read_context_length(settings: ModelSettings, config: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt with its answer: those of the settings, else those of the config. Logs a
    warning if the settings want more than the config allows."""
    sources = (config.get("text_config") or {}, config)
    found = [source[key] for source in sources for key in _CONTEXT_KEYS if source.get(key)]
    wanted = settings.context_length
    if wanted is not None and found and wanted > (most := max(int(found[0]), *map(_read_extended, sources))):
        log.warning(
            "model.context_length is %d, but the model's config allows %d tokens; answers beyond may be bad",
            wanted,
            most,
        )
    return wanted or int(found[0] if found else DEFAULT_CONTEXT)


def _read_extended(config: Mapping[str, Any]) -> int:
    """The context that the scaling of positions, such as YaRN's, makes of the original one; 0 for none."""
    scaling = config.get("rope_scaling") or {}
    return int((scaling.get("original_max_position_embeddings") or 0) * (scaling.get("factor") or 1))


def read_sampling_defaults(folder: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling values that the authors of the model in `folder` recommend; do_sample: false means greedy.
    Logs a warning of a value that is none."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {}
    for key in _DEFAULTS:
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[key] = float(value)
        elif value is not None:
            _warn_of_ignored(folder, GENERATION, key, value, "a number")
    return found
