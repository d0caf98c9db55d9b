"""The rows of a task, from a table or a data set of the Hugging Face hub. Images in such a data set become
data URLs.
"""

from __future__ import annotations

import base64
import importlib
import io
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.suites.suite_settings import HubSource
from mlxrun.jobs.lines.table_files import Row, RowError, read_rows

Rows = Iterator[tuple[int, Row | RowError]]
_IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows come from; they can be read any number of times. `name`: the source in messages; `folder`:
    the folder of relative paths in the rows, None if there is none."""

    name: str
    folder: Path | None
    path: Path | None = None
    dataset: Any = None

    def read(self, limit: int | None = None) -> Rows:
        """Yield the first `limit` rows with their numbers. JobError if the file cannot be read."""
        if self.path is not None:
            return itertools.islice(read_rows(self.path), limit)
        return itertools.islice(enumerate(map(_convert_row, self.dataset), 1), limit)


def open_rows(data: str | None, hub: HubSource | None, folder: Path) -> RowSource:
    """Open the rows of a file or a data set. JobError if it is missing or cannot be loaded. `folder`: the
    suite's folder."""
    if hub is not None:
        return RowSource(f"{hub.name}[{hub.split}]", None, dataset=_load_dataset(hub, folder))
    path = folder / Path(str(data)).expanduser()
    if not path.is_file():
        raise JobError(f"{path}: there is no such file")
    return RowSource(str(path), path.parent, path)


def _load_dataset(hub: HubSource, folder: Path) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise JobError(f"hub data sets need `datasets`: pip install 'mlxrun[hub]' ({hub.name})") from error
    for name in ("datasets", "huggingface_hub"):  # they would print each message, and log it too
        logging.getLogger(name).handlers.clear()
    local = folder / Path(hub.name).expanduser()
    name = str(local.resolve()) if local.is_dir() else hub.name
    try:
        return datasets.load_dataset(name, hub.subset, split=hub.split, revision=hub.revision)
    except Exception as error:  # the library raises exceptions of many libraries
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise JobError(f"the data set {hub.name} cannot be loaded: {reason}") from error


def _convert_row(row: Mapping[str, Any]) -> Row:
    return {key: _convert_value(value) for key, value in row.items()}


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
