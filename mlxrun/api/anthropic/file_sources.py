"""Puts the contents of files in place of their ids in bodies of Anthropic's messages.

    {"type": "image" | "document", "source": {"type": "file", "file_id": "file_..."}}

Images and PDFs become base64, and text files texts, as if the client had sent them so. Blocks of other shapes
stay as they are, for the checks that follow.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from mlxrun.api.anthropic.fields import EXTRA, SOURCES
from mlxrun.api.body_schema import STRING, object_of
from mlxrun.api.stored_files import PDF, FileContent, ReadFile, read_content
from mlxrun.core.field_errors import UNKNOWN, quote, reject, reject_unsupported, shorten

Json = dict[str, Any]
FILE_SOURCE = object_of({"file_id": STRING})
IMAGE_TYPES = SOURCES["base64"]["properties"]["media_type"]["enum"]


def find_file_sources(body: Any) -> list[tuple[str, Json]]:
    """The path and the block of each image and document whose source is a file."""
    messages = body.get("messages") if isinstance(body, dict) else None
    return list(_find_in_list(messages, "messages")) if isinstance(messages, list) else []


def _find_in_list(items: list[Any], where: str) -> Iterator[tuple[str, Json]]:
    """The blocks in a list of messages, or of blocks, of which tool results have blocks too."""
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        source = item.get("source")
        if (
            item.get("type") in ("image", "document")
            and isinstance(source, dict)
            and source.get("type") == "file"
        ):
            yield f"{where}.{i}", item
        elif isinstance(item.get("content"), list):
            yield from _find_in_list(item["content"], f"{where}.{i}.content")


async def inline_files(body: Any, read_file: ReadFile, max_bytes: int) -> Any:
    """`body` with the contents of its files, which together have at most `max_bytes`; `body` itself is not
    changed. RequestError if one does not exist, or is no image, PDF or text."""
    sources = find_file_sources(body)
    if not sources:
        return body
    replaced: dict[int, Json] = {}
    for path, block in sources:
        content = await _read(block["source"], f"{path}.source", read_file, max_bytes)
        max_bytes -= len(content.data)
        source = _convert(block["type"], content, f"{path}.source.file_id")
        replaced[id(block)] = {**block, "source": source}
    return {**body, "messages": _replace_blocks(body["messages"], replaced)}


async def _read(source: Json, where: str, read_file: ReadFile, most: int) -> FileContent:
    for key in source:
        if key not in ("type", "file_id"):
            reject(f"{where}.{shorten(key)}", EXTRA, code=UNKNOWN)
    return await read_content(source.get("file_id"), f"{where}.file_id", read_file, most)


def _convert(kind: str, content: FileContent, where: str) -> Json:
    """The source of a block with this content."""
    media_type = content.plain_type
    if kind == "image" and media_type not in IMAGE_TYPES:
        reject(where, f"the file is {quote(media_type)}, which is none of {', '.join(IMAGE_TYPES)}")
    if kind == "image" or media_type == PDF:
        data = base64.b64encode(content.data).decode()
        return {"type": "base64", "media_type": media_type, "data": data}
    if not media_type.startswith("text/"):
        reject_unsupported(where, f"the file is {quote(media_type)}, neither a PDF nor a text")
    try:
        return {"type": "text", "media_type": "text/plain", "data": content.data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        reject(where, f"the file is not UTF-8 at byte {error.start}")


def _replace_blocks(items: list[Any], replaced: dict[int, Json]) -> list[Any]:
    """A copy of a list of messages or blocks, with those that are replaced."""
    found = []
    for item in items:
        if id(item) in replaced:
            item = replaced[id(item)]
        elif isinstance(item, dict) and isinstance(item.get("content"), list):
            item = {**item, "content": _replace_blocks(item["content"], replaced)}
        found.append(item)
    return found
