"""Finds the files of a model and its draft model, and reads the small ones.

Without a network the library of the hub repeats some requests for half a minute, and longer where nobody
answers. So it is asked for something only if the hub answers. A download that has begun is left to the
library, which repeats and resumes it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.config.contradictions import HUB_ID, explain_missing_config
from mlxrun.config.settings import ModelSettings
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import ConfigError, MlxrunError, ModelLoadError
from mlxrun.core.hub_connection import is_hub_reachable
from mlxrun.core.text_files import open_regular, read_text_file
from mlxrun.model.load.load_progress import note_download

log = logging.getLogger(__name__)
GGUF = ".gguf"
_TEXT_PARTS = ("text_config", "llm_config", "language_config")  # names of that part, by family
_MAX_JSON = 1 << 28  # bytes: more is no file of settings, nor an index of weights
EMBEDDED = Path(__file__).parent.parent / "embedded" / "model"
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]
WEIGHT_FILES = ["*.safetensors"]
# Mistral's checkpoints have their weights once more under these names, which no library of MLX reads.
UNREAD_FILES = "consolidated*"


def find_model_folder(settings: ModelSettings, weights: bool = True) -> Path:
    """The folder of the model, or its GGUF file. A model on the hub is downloaded. `weights`: with its
    weights."""
    if settings.path == "embedded":
        return EMBEDDED
    try:
        folder = expand_home(settings.path, "model.path")
        is_file = folder.is_file()
    except OSError as error:  # the path is too long, or may not be looked at
        raise ConfigError(f"model.path: {settings.path}: {error.strerror}") from error
    if is_file:
        if folder.suffix != GGUF:
            raise ConfigError(f"model.path: {folder} is neither a folder nor a {GGUF} file")
        return folder
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ConfigError(f"model.path: {explain_missing_config(folder)}")
        return folder
    if folder.suffix == GGUF:
        raise ConfigError(f"model.path: there is no file {folder}")
    if HUB_ID.fullmatch(settings.path) is None:
        raise ConfigError(f"model.path: there is no folder {folder}")
    return _download(settings, weights)


def make_draft_settings(settings: ModelSettings) -> ModelSettings:
    """The settings of the draft model, from those of its target."""
    assert settings.draft is not None
    own = ModelSettings(path=settings.draft, kind="text", dtype=settings.dtype)
    return replace(own, dequantize=settings.dequantize, trust_remote_code=settings.trust_remote_code)


@contextmanager
def name_draft() -> Iterator[None]:
    """Within the block, errors of loading a model name the setting `model.draft`, as ConfigErrors."""
    try:
        yield
    except MlxrunError as error:
        reason = str(error).removeprefix("model.path: ").removeprefix("model.kind: ")
        raise ConfigError(f"model.draft: {reason}") from error


def find_draft_folder(settings: ModelSettings, weights: bool = True) -> Path:
    """The folder of the draft model, as `find_model_folder`. `settings`: of the target. ConfigError if there
    is none."""
    with name_draft():
        return find_model_folder(make_draft_settings(settings), weights)


def _download(settings: ModelSettings, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    log.info("looking for %s in the local cache and on the hub", settings.path)
    patterns = [*SMALL_FILES, *WEIGHT_FILES] if weights else SMALL_FILES
    try:
        with note_download():
            found = snapshot_download(
                settings.path,
                revision=settings.revision,
                allow_patterns=patterns,
                ignore_patterns=UNREAD_FILES,
                local_files_only=not is_hub_reachable(),
            )
            return Path(found)
    except LocalEntryNotFoundError as error:  # its text has the texts of others, over several lines
        raise ModelLoadError(
            f"model.path: {settings.path!r} is neither a local folder nor a model in the local cache of the "
            "hub, and the hub cannot be reached"
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ModelLoadError(
            f"model.path: {settings.path!r} is neither a local folder nor a model on the hub: {error}"
        ) from error


def check_small_files(folder: Path) -> None:
    """ModelLoadError if a small file of the model is a FIFO or a device, since a library would wait for
    it."""
    for path in sorted(file for pattern in SMALL_FILES for file in folder.glob(pattern)):
        if not path.is_dir():
            check_plain_file(path)


def list_weight_files(folder: Path) -> list[Path]:
    """The files with the weights of the model in `folder`, or the GGUF file itself."""
    return [folder] if folder.is_file() else _list_read_files(folder, "*.safetensors")


def list_weight_indexes(folder: Path) -> list[Path]:
    """The files that say in which file each tensor of the model is."""
    return _list_read_files(folder, "*.safetensors.index.json")


def _list_read_files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(folder.glob(pattern)) if not path.match(UNREAD_FILES)]


def count_file_bytes(folder: Path) -> int:
    """Bytes of the weights on disk."""
    return sum(path.stat().st_size for path in list_weight_files(folder))


def check_plain_file(path: Path) -> None:
    """ModelLoadError if this is not a file on a disk: opening a pipe would wait forever."""
    try:
        open_regular(path).close()
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error


def check_architecture(config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError if the config does not name the architecture."""
    name = config.get("model_type")
    if (name and isinstance(name, str)) or (name is None and "model_file" in config):
        return
    wrong = "is missing" if name is None else f"is {name!r:.60}"
    raise ModelLoadError(
        f"{folder / 'config.json'}: model_type {wrong}; it must name the model's architecture, such as llama"
    )


def find_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model; empty if it has none."""
    parts = (config, config.get("thinker_config"))  # of Qwen3-Omni
    found = (part.get(name) for part in parts if isinstance(part, Mapping) for name in _TEXT_PARTS)
    return next((each for each in found if each and isinstance(each, Mapping)), {})


def find_hidden_size(config: Mapping[str, Any]) -> int | None:
    """The width of a model's hidden states; None if the config does not say."""
    for source in (find_text_config(config), config):
        for key in ("hidden_size", "d_model", "n_embd", "dim"):
            if isinstance(source.get(key), int):
                return int(source[key])
    return None


def check_remote_code(settings: ModelSettings, config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError if the model has Python code in its folder, which the libraries would run, and the
    settings do not trust it."""
    if "model_file" in config and not settings.trust_remote_code:
        raise ModelLoadError(
            f"{folder}: config.json names Python code of its own (model_file), which is not run because it "
            "could do anything on this machine: read it, and set model.trust_remote_code to run it"
        )


def _read_value(path: Path, absent: Any) -> Any:
    """The JSON value of a file, `absent` if there is no such file; else ModelLoadError."""
    try:
        return json.loads(read_text_file(path, _MAX_JSON))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return absent
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path}: its values are nested too deeply") from error
    except ValueError as error:  # no UTF-8, no JSON, or integers of thousands of digits
        raise ModelLoadError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, {} if the file is absent. ModelLoadError for anything else."""
    value = _read_value(path, {})
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file with a list of them, [] if the file is absent. ModelLoadError for anything
    else."""
    value = _read_value(path, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelLoadError(f"{path}: not a list of JSON objects")
    return value
