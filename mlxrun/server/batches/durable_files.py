"""Documents that are replaced as a whole, hard links, and errors that name the path."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxrun.batch.run_paths import write_atomically
from mlxrun.errors import MlxrunError


class StorageError(MlxrunError):
    """The server's folder cannot be used; the text names the cause."""

    http_status = 503
    code = "storage_unavailable"


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be used: {error.strerror or error}") from error


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, under which it outlives the first. The file is copied if the file system has
    no hard links; it is never changed again, so a link is as good as a copy."""
    temp = target.with_name(target.name + ".tmp")
    temp.unlink(missing_ok=True)
    try:
        os.link(source, temp)
    except OSError:
        shutil.copyfile(source, temp)
    temp.replace(target)


def write_json(path: Path, value: Any) -> None:
    """Replace a small document atomically and durably."""
    write_atomically(path, json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> dict[str, Any]:
    """A document that `write_json` wrote; empty if it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
