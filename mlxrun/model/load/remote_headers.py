"""The headers of a hub model's weights, in place of the weights: some kB of each file are read.

The files that are made have the headers and the sizes of the real ones, and no values. They take no space on
a disk that stores holes as such. What reads headers alone cannot tell the difference.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.hub import convert_hub_errors, is_hub_id
from mlxrun.model.load.model_files import UNREAD_FILES, find_model_folder, list_weight_files
from mlxrun.model.load.tensor_files import TensorEntry, check_shards


@contextmanager
def open_headers(settings: ModelSettings) -> Iterator[ModelSettings]:
    """The settings of a model whose files may be read for their headers meanwhile. Of a hub model whose
    weights are not in the local cache, the headers alone are downloaded. ModelLoadError if there is none."""
    if not is_hub_id(settings.path):
        yield settings
        return
    folder = find_model_folder(settings, weights=False)
    if _has_weights(folder):
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="mlxrun-headers-") as scratch:
        made = Path(scratch) / settings.path.rpartition("/")[2]
        made.mkdir()
        for file in folder.rglob("*"):  # also those of sentence-transformers in folders of their own
            if file.is_file() and file.suffix != ".safetensors":
                link = made / file.relative_to(folder)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
        for name, entries in _read_headers(settings).items():
            write_hollow_file(made / name, entries)
        yield replace(settings, path=str(made), names=settings.names or (settings.path,))


def _has_weights(folder: Path) -> bool:
    """Whether all weights are in the folder."""
    if not list_weight_files(folder):
        return False
    try:
        check_shards(folder)
    except ModelLoadError:
        return False
    return True


def _read_headers(settings: ModelSettings) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each file of weights, by its name. ModelLoadError if the hub has none."""
    from huggingface_hub import HfApi

    api, revision = HfApi(), settings.revision
    with convert_hub_errors(settings.path):
        siblings = api.model_info(settings.path, revision=revision).siblings or []
        names = [file.rfilename for file in siblings if file.rfilename.endswith(".safetensors")]
        names = [name for name in names if "/" not in name and not Path(name).match(UNREAD_FILES)]
        found = {
            name: api.parse_safetensors_file_metadata(settings.path, name, revision=revision).tensors
            for name in names
        }
    if not found:
        raise ModelLoadError(f"{settings.path}: the hub has no *.safetensors of it")
    return {
        name: {
            tensor: TensorEntry(entry.dtype, tuple(entry.shape), *entry.data_offsets)
            for tensor, entry in tensors.items()
        }
        for name, tensors in found.items()
    }


def write_hollow_file(path: Path, entries: dict[str, TensorEntry]) -> None:
    """Write a safetensors file with these tensors, without values."""
    header = json.dumps(
        {
            name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
            for name, entry in entries.items()
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + max((entry.stop for entry in entries.values()), default=0))
