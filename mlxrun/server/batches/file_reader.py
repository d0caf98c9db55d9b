"""Finds the files of an API key, and reads those that bodies of requests name."""

from __future__ import annotations

from mlxrun.api.stored_files import FileContent, ReadFile
from mlxrun.core.errors import BodyTooLarge, NotFound
from mlxrun.core.field_errors import quote
from mlxrun.server.batches.durable_files import convert_errors
from mlxrun.server.batches.storage import Storage
from mlxrun.server.batches.stored_file import StoredFile
from mlxrun.server.http.access import may_access


def find_own_file(storage: Storage, key: str, file_id: str) -> StoredFile | None:
    """A file that requests with the API key of this name may see."""
    file = storage.find(file_id)
    return file if file is not None and may_access(key, file.owner) else None


def make_file_reader(storage: Storage, key: str) -> ReadFile:
    """Reads files for requests that were sent with the API key of this name."""

    def read(file_id: str, max_bytes: int) -> FileContent:
        file = find_own_file(storage, key, file_id)
        if file is None:
            raise NotFound(f"there is no file {quote(file_id)}")
        if file.bytes > max_bytes:
            raise BodyTooLarge(f"the file has {file.bytes} bytes: the body would be too large with it")
        content = storage.find_content(file_id)
        with convert_errors(content):
            return FileContent(file.media_type, content.read_bytes())

    return read
