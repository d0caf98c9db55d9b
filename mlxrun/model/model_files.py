"""Finds a model's files, and computes the digests that identify them in a manifest."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxrun.config.contradictions import explain_missing_config
from mlxrun.config.settings import ModelSettings
from mlxrun.errors import ConfigError, ModelLoadError
from mlxrun.model.load_progress import LoadProgress

log = logging.getLogger(__name__)
GGUF = ".gguf"
EMBEDDED = Path(__file__).parent.parent / "embedded" / "model"
_FULL_HASH_BYTES = 1 << 30  # files up to this size are hashed in full
_BLOCK = 1 << 16
_SAMPLES = 1024
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]


def find_model_folder(settings: ModelSettings, weights: bool = True) -> Path:
    """The folder of the model, or its GGUF file. A model on the hub is downloaded; `weights`: whether with
    its weights."""
    if settings.path == "embedded":
        return EMBEDDED
    folder = Path(settings.path).expanduser()
    if folder.is_file():
        if folder.suffix != GGUF:
            raise ConfigError(f"model.path: {folder} is neither a folder nor a {GGUF} file")
        return folder
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {explain_missing_config(folder)}")
        return folder
    if settings.path.count("/") != 1 or settings.path.startswith((".", "/", "~")):
        raise ModelLoadError(f"model.path: there is no folder {folder}")
    return _download(settings, weights)


def _download(settings: ModelSettings, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    log.info("looking for %s in the local cache and on the hub", settings.path)
    patterns = [*_TEXT_FILES, "*.safetensors"] if weights else _TEXT_FILES
    try:
        return Path(snapshot_download(settings.path, revision=settings.revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:  # its text has the texts of others, over several lines
        raise ModelLoadError(
            f"model.path: {settings.path!r} is neither a local folder nor a model in the local cache of the "
            "hub, and the hub cannot be reached"
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ModelLoadError(
            f"model.path: {settings.path!r} is neither a local folder nor a model on the hub: {error}"
        ) from error


def list_weight_files(folder: Path) -> list[Path]:
    """The files with the weights of the model in `folder`, or the GGUF file itself."""
    return [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))


def check_weights(folder: Path) -> None:
    """ModelLoadError if there are none."""
    if not list_weight_files(folder):
        raise ModelLoadError(f"no *.safetensors in {folder}: the model has no weights")


def check_remote_code(settings: ModelSettings, config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError if the model is Python code in its folder, which the libraries would run."""
    if "model_file" in config and not settings.trust_remote_code:
        raise ModelLoadError(
            f"{folder}: config.json names Python code of its own (model_file), which is not run because it "
            "could do anything on this machine: read it, and set model.trust_remote_code to run it"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, {} if the file is absent; ModelLoadError if it is something else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that has a list of them, [] if the file is absent; else ModelLoadError."""
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelLoadError(f"{path}: not a list of JSON objects")
    return value


class LateDigests(Mapping[str, str]):
    """Digests by name, for which files are read when they are asked for. `sources`: for each name, what
    computes its digest and perhaps others."""

    def __init__(self, sources: Mapping[str, Callable[[], Mapping[str, str]]]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> str:
        return self._sources[name]()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def compute_digests(
    folder: Path, adapter: Path | None, chat_template: str | None, *, code: bool = False
) -> dict[str, str]:
    """sha256 of `model` (config, weights, LoRA adapter), `tokenizer` and `template`. `code`: whether Python
    files of the folder may run, and are part of the model."""
    weights = list_weight_files(folder) + (sorted(adapter.glob("*")) if adapter else [])
    weights += sorted(folder.rglob("*.py")) if code else []
    weights += sorted(folder.glob("*sentence*.json"))  # of sentence-transformers: prompts, the activation
    if (folder / "modules.json").is_file():  # and pooling, further layers
        weights += [folder / "modules.json"]
        weights += sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/*.safetensors"))
    tokenizer = [folder / n for n in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")]
    tokenizer += [folder / "tiktoken.model", *sorted(folder.glob("*.tiktoken"))]
    total = sum(path.stat().st_size for path in weights if path.is_file())
    progress = LoadProgress(f"reading the files of {folder.name} for their digests", total)
    return {
        "model": _hash_files([folder / "config.json", *weights], progress),
        "tokenizer": _hash_files(tokenizer, progress),
        "template": hashlib.sha256((chat_template or "").encode()).hexdigest(),
    }


def digest_adapter(folder: Path) -> str:
    """sha256 of the files of a LoRA adapter."""
    return _hash_files(sorted(folder.glob("*")), LoadProgress(f"reading {folder.name} for its digest", 0))


def _hash_files(paths: list[Path], progress: LoadProgress) -> str:
    total = hashlib.sha256()
    for path in paths:
        if path.is_file():
            total.update(f"{path.name}:{path.stat().st_size}:".encode())
            _hash_file(total, path, progress)
    return total.hexdigest()


def _hash_file(total: hashlib._Hash, path: Path, progress: LoadProgress) -> None:
    """Hash the file, or evenly spaced blocks of it if all of it would take seconds."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _FULL_HASH_BYTES:
            while block := file.read(1 << 20):
                total.update(block)
                progress.add(len(block))
            return
        for i in range(_SAMPLES):
            file.seek(i * (size - _BLOCK) // (_SAMPLES - 1))
            total.update(file.read(_BLOCK))
        progress.add(size)
