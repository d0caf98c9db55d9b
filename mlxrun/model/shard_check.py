"""Finds that a download is incomplete, before weights are read: an index names a file that is not there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from mlxrun.errors import ModelLoadError
from mlxrun.model.model_files import list_weight_files, read_json
from mlxrun.model.tensor_files import read_entries

log = logging.getLogger(__name__)


def check_shards(folder: Path) -> None:
    """ModelLoadError if an index names a file that is missing, unless the other files have all its weights:
    then the index is of another checkpoint, the libraries do not read it, and it is a warning."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        places = read_json(index).get("weight_map")
        if not isinstance(places, Mapping):
            continue
        missing = sorted({str(name) for name in places.values() if not (folder / str(name)).is_file()})
        if not missing:
            continue
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"{missing[0]}{more}, named in {index.name}, {'are' if more else 'is'} missing"
        if not places.keys() <= _list_names(folder):
            raise ModelLoadError(f"{folder}: {problem}: an incomplete download?")
        log.warning("%s: %s, but the other files have all its weights", folder, problem)


def _list_names(folder: Path) -> set[str]:
    """The names of the weights in the files that are there. ModelLoadError if one cannot be read."""
    found: set[str] = set()
    for file in list_weight_files(folder):
        found |= read_entries(file).keys()
    return found
