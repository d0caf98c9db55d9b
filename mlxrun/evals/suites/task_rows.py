"""The rows of a task, from a table or a data set of the Hugging Face hub. Images in such a data set become
data URLs.
"""

from __future__ import annotations

import base64
import importlib
import io
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.api.text.media.media_kinds import find_sound_kind
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import JobError
from mlxrun.core.hub_connection import is_hub_reachable
from mlxrun.core.text_files import explain_missing_file
from mlxrun.evals.suites.suite_settings import HubSource
from mlxrun.jobs.lines.table_files import Row, RowError, read_rows

Rows = Iterator[tuple[int, Row | RowError]]
Prepare = Callable[[Row], Any]
_IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows come from; they can be read any number of times. `name`: the source in messages; `folder`:
    the folder of relative paths in the rows, None if there is none."""

    name: str
    folder: Path | None
    path: Path | None = None
    dataset: Any = None
    prepare: Prepare | None = None

    def read(self, limit: int | None = None) -> Rows:
        """Yield the first `limit` rows with their numbers. JobError if the file cannot be read."""
        if self.path is not None:
            rows = read_rows(self.path)
        else:
            found = ({key: _convert_value(value) for key, value in row.items()} for row in self.dataset)
            rows = enumerate(found, 1)
        rows = itertools.islice(rows, limit)
        if self.prepare is None:
            return rows
        return ((number, _prepare_row(self.prepare, row)) for number, row in rows)


def open_rows(
    data: str | None, hub: HubSource | None, folder: Path, prepare: Prepare | None = None
) -> RowSource:
    """Open the rows of a file or a data set. JobError if it is missing or cannot be loaded. `folder`: the
    suite's folder; `prepare`: changes each row."""
    if hub is not None:
        dataset = _load_dataset(hub, folder)
        return RowSource(f"{hub.name}[{hub.split}]", None, dataset=dataset, prepare=prepare)
    path = folder / expand_home(str(data))
    if (reason := explain_missing_file(path)) is not None:
        raise JobError(f"{path}: {reason}")
    return RowSource(str(path), path.parent, path, prepare=prepare)


def _prepare_row(prepare: Prepare, row: Row | RowError) -> Row | RowError:
    if isinstance(row, RowError):
        return row
    try:
        found = prepare(row)
    except Exception as error:  # of a user's function
        return RowError(f"`prepare` raised {type(error).__name__}: {error}")
    return found if isinstance(found, dict) else RowError("`prepare` returned no dict")


def _load_dataset(hub: HubSource, folder: Path) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        how = "pip install 'mlxrun[hub]', or give a file as `data` (--data)"
        raise JobError(f"the data set {hub.name} is on the hub, which needs `datasets`: {how}") from error
    for name in ("datasets", "huggingface_hub"):  # they would print each message, and log it too
        logging.getLogger(name).handlers.clear()
    local = folder / expand_home(hub.name)
    name = str(local.resolve()) if local.is_dir() else hub.name
    offline = not local.is_dir() and _stay_offline(datasets)
    try:
        return datasets.load_dataset(name, hub.subset, split=hub.split, revision=hub.revision)
    except Exception as error:  # the library raises exceptions of many libraries
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if offline:
            reason = "the hub does not answer, and the local cache has it not; give a file as `data` (--data)"
        raise JobError(f"the data set {hub.name} cannot be loaded: {reason}") from error


def _stay_offline(datasets: Any) -> bool:
    """Whether the hub does not answer. Then its libraries use only their cache in this process; they would
    repeat each request for half a minute."""
    from huggingface_hub import constants

    if is_hub_reachable():
        return False
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return True


def _convert_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_convert_value(each) for each in value]
    if hasattr(value, "save") and hasattr(value, "getbands"):  # an image of Pillow
        written = io.BytesIO()
        value.save(written, "PNG")
        return make_data_url(written.getvalue())
    return value


def make_data_url(data: bytes) -> str:
    """Make a data URL of an encoded image. RowError if its type is unknown."""
    kind = next((name for head, name in _IMAGE_TYPES.items() if data.startswith(head)), None)
    if kind is None:
        raise RowError("an image is neither PNG, JPEG, GIF nor WebP")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def make_sound_url(data: bytes) -> str:
    """Make a data URL of an encoded sound. RowError if its type is unknown."""
    kind = find_sound_kind(data)
    if kind is None:
        raise RowError("a sound is neither WAV, MP3, FLAC, M4A, Ogg nor WebM")
    return f"data:audio/{kind};base64,{base64.b64encode(data).decode()}"
