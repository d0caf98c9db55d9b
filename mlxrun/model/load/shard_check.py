"""Finds that a download is incomplete, before weights are read: an index names a file that is not there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_files import read_json
from mlxrun.model.load.tensor_files import read_folder_entries

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
        if not places.keys() <= read_folder_entries(folder).keys():
            raise ModelLoadError(f"{folder}: {problem}: an incomplete download?")
        log.warning("%s: %s, but the other files have all its weights", folder, problem)
