"""Puts the contents of stored files in place of their ids in bodies of OpenAI's chats and responses.

    {"type": "file", "file": {"file_id": "file-..."}}      {"type": "input_file", "file_id": "file-..."}

The contents become `file_data`, as if the client had sent them so. Parts of other shapes stay as they are,
for the checks that follow.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxrun.api.text.media.documents import PDF_START
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import check_type, quote, reject, reject_unsupported

Json = dict[str, Any]
PDF = "application/pdf"


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file that a body names. `media_type` as it was uploaded."""

    media_type: str
    data: bytes

    @property
    def plain_type(self) -> str:
        """The media type in lower case, without parameters. That of a PDF that was uploaded as plain bytes is
        the PDF's."""
        found = self.media_type.partition(";")[0].strip().lower()
        is_pdf = found in ("", "application/octet-stream") and self.data.startswith(PDF_START)
        return PDF if is_pdf else found


# Reads the file with an id, of at most so many bytes; NotFound or BodyTooLarge if it cannot. It blocks.
ReadFile = Callable[[str, int], FileContent]


async def read_content(file_id: Any, where: str, read_file: ReadFile, most: int) -> FileContent:
    """The content of a file; errors name the field `where`, which has its id."""
    check_type(file_id, str, where)
    try:
        return await asyncio.to_thread(read_file, file_id, most)
    except RequestError as error:
        error.args, error.param = (f"{where}: {error}",), where
        raise


def has_file_parts(body: Any) -> bool:
    """Whether a body names stored files."""
    return any(True for _ in _find_parts(body))


async def inline_file_parts(body: Any, read_file: ReadFile, max_bytes: int) -> Any:
    """`body` with the contents of its files, which together have at most `max_bytes`; `body` itself is not
    changed. RequestError if one does not exist, or is no PDF."""
    found = list(_find_parts(body))
    if not found:
        return body
    body = {**body}
    for name, i, field, j in found:
        part = body[name][i][field][j]
        in_chat = part["type"] == "file"
        where = f"{name}[{i}].{field}[{j}]{'.file' if in_chat else ''}.file_id"
        file = dict(part["file"] if in_chat else part)
        file_id = file.pop("file_id")
        for other in ("file_data", "file_url"):
            if file.get(other) is not None:
                reject(where, f"not together with {other}")
        content = await read_content(file_id, where, read_file, max_bytes)
        max_bytes -= len(content.data)
        if content.plain_type != PDF:
            reject_unsupported(where, f"the file is {quote(content.plain_type)}, and only {PDF} is read")
        file["file_data"] = f"data:{PDF};base64,{base64.b64encode(content.data).decode()}"
        new = {**part, "file": file} if in_chat else file
        item = body[name][i]
        parts = [*item[field][:j], new, *item[field][j + 1 :]]
        body[name] = [*body[name][:i], {**item, field: parts}, *body[name][i + 1 :]]
    return body


def _find_parts(body: Any) -> Iterator[tuple[str, int, str, int]]:
    """Where the parts with a file id are, in the messages of a chat or in the input of a response."""
    for name in ("messages", "input"):
        items = body.get(name) if isinstance(body, dict) else None
        for i, item in enumerate(items if isinstance(items, list) else ()):
            for field in ("content", "output"):
                parts = item.get(field) if isinstance(item, dict) else None
                for j, part in enumerate(parts if isinstance(parts, list) else ()):
                    if _has_file_id(part):
                        yield name, i, field, j


def _has_file_id(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    file = part.get("file") if kind == "file" else part if kind == "input_file" else None
    return isinstance(file, dict) and file.get("file_id") is not None
