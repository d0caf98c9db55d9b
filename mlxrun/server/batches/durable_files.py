"""Writes documents atomically, makes hard links, and raises errors that name the path."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import MlxrunError
from mlxrun.core.text_files import read_regular

T = TypeVar("T")
_MAX_DOCUMENT = 64_000_000  # bytes
_MAX_TIME = 253_402_300_799  # the last second that a date can have


class StorageError(MlxrunError):
    """The server's folder cannot be used. The text names the cause."""

    http_status = 503
    code = "storage_unavailable"


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, FileExistsError) and os.path.isfile(error.filename):
            reason = f"{error.filename} is not a folder"
        raise StorageError(f"{path}: cannot be used: {reason}") from error


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, under which it outlives the first. If the file system has no hard links, the
    file is copied. Call it only for files that never change."""
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
    """Read a document of `write_json`; empty if it cannot be read."""
    try:
        found = json.loads(read_regular(path, _MAX_DOCUMENT))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_object(path: Path, kind: type[T]) -> T | None:
    """Read an object of the dataclass `kind`, whose fields `write_json` wrote. None if it cannot be read, or
    if a field is not as in the class. Fields named `..._at` are seconds since 1970."""
    values, hints = read_json(path), get_type_hints(kind)
    for name, value in values.items():
        is_time = name.endswith("_at") and value is not None
        if not has_type(value, hints.get(name)) or (is_time and not 0 <= value <= _MAX_TIME):
            return None
    try:
        return kind(**values)
    except TypeError:  # a field is missing
        return None


def has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value is what an annotation says."""
    if hint is Any:
        return True
    if isinstance(hint, UnionType):
        return any(has_type(value, each) for each in get_args(hint))
    if get_origin(hint) is dict:
        of_key, of_value = get_args(hint)
        return isinstance(value, dict) and all(
            has_type(key, of_key) and has_type(each, of_value) for key, each in value.items()
        )
    return type(value) is (NoneType if hint is None else hint)
