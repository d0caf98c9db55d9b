"""Puts the contents of stored files in place of their ids in bodies of chats, responses and messages.

    {"type": "file", "file": {"file_id": "file-..."}}
    {"type": "input_file" | "input_image", "file_id": "file-..."}
    {"type": "image" | "document", "source": {"type": "file", "file_id": "file_..."}}

The result is as if the client had sent the contents. OpenAI's parts become those of the file's kind: a PDF,
an image, audio or, in chats, a video. Anthropic's images and PDFs become base64, and its text files become
texts. Parts of other shapes are left to later checks.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxrun.api.anthropic.fields import IMAGE_TYPES
from mlxrun.api.anthropic.tagged_schema import EXTRA
from mlxrun.api.text.media.media_kinds import AUDIO, IMAGE, PDF, PDF_START, VIDEO, find_medium
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import UNKNOWN, check_type, quote, reject, reject_unsupported, shorten

Json = dict[str, Any]
_LISTS = ("content", "output")  # fields of messages, items and blocks that have parts
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file that a body names. `media_type`: as the client uploaded it."""

    media_type: str
    data: bytes

    @property
    def plain_type(self) -> str:
        """The media type in lower case, without parameters. A PDF uploaded as plain bytes counts as a PDF."""
        found = self.media_type.partition(";")[0].strip().lower()
        is_pdf = found in ("", "application/octet-stream") and self.data.startswith(PDF_START)
        return PDF.mime if is_pdf else found


# Reads the file with an id, of at most so many bytes; NotFound or BodyTooLarge if it cannot. It blocks.
ReadFile = Callable[[str, int], FileContent]


async def read_content(file_id: Any, where: str, read_file: ReadFile, most: int) -> FileContent:
    """Read a file of at most `most` bytes. `where`: the field that has its id; RequestErrors name it."""
    check_type(file_id, str, where)
    try:
        return await asyncio.to_thread(read_file, file_id, most)
    except RequestError as error:
        error.args, error.param = (f"{where}: {error}",), where
        raise


def find_file_parts(body: Any) -> list[tuple[str, Json]]:
    """Find the parts of a body that name a file. Each has its path in the body."""
    fields = {name: body.get(name) for name in ("messages", "input")} if isinstance(body, dict) else {}
    items = {
        f"{name}[{i}]": item
        for name, value in fields.items()
        if isinstance(value, list)
        for i, item in enumerate(value)
    }
    return [found for path, item in items.items() for found in _find_in(item, path)]


def _find_in(item: Any, where: str) -> Iterator[tuple[str, Json]]:
    """Those in a message, an item, or a block, of which tool results have parts too."""
    for name in _LISTS:
        parts = item.get(name) if isinstance(item, dict) else None
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            path = f"{where}.{name}[{i}]"
            if _has_file_id(part):
                yield path, part
            else:
                yield from _find_in(part, path)


def _has_file_id(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image", "document"):
        return isinstance(part.get("source"), dict) and part["source"].get("type") == "file"
    file = part.get("file") if kind == "file" else part if kind in ("input_file", "input_image") else None
    return isinstance(file, dict) and file.get("file_id") is not None


async def inline_files(body: Any, read_file: ReadFile, max_bytes: int) -> Any:
    """Return `body` with the contents of its files, at most `max_bytes` together; `body` is not changed.
    RequestError if a file does not exist, is too large, or has a type that the part may not have."""
    found = find_file_parts(body)
    if not found:
        return body
    replaced: dict[int, Json] = {}
    for path, part in found:
        if "source" in part:
            where = _INDEX.sub(r".\1", f"{path}.source")
            file, convert = part["source"], _convert_source
        else:
            where = f"{path}.file" if part["type"] == "file" else path
            file, convert = part.get("file", part), _convert_file
        content = await read_content(file.get("file_id"), f"{where}.file_id", read_file, max_bytes)
        max_bytes -= len(content.data)
        replaced[id(part)] = convert(part, content, where)
    return {
        name: _replace(value, replaced) if name in ("messages", "input") else value
        for name, value in body.items()
    }


def _replace(value: Any, replaced: dict[int, Json]) -> Any:
    """A copy of messages, items or parts, with those that are replaced."""
    if isinstance(value, list):
        return [replaced.get(id(item)) or _replace(item, replaced) for item in value]
    if not isinstance(value, dict):
        return value
    return value | {name: _replace(value[name], replaced) for name in _LISTS if name in value}


def _convert_file(part: Json, content: FileContent, where: str) -> Json:
    """A part of a chat or a response with the data of a file, by the kind of the file."""
    file = {key: value for key, value in part.get("file", part).items() if key != "file_id"}
    for other in ("file_data", "file_url", "image_url"):
        if file.get(other) is not None:
            reject(f"{where}.file_id", f"not together with {other}")
    medium, is_chat = find_medium(content.data, content.plain_type), "file" in part
    taken = [IMAGE] if part["type"] == "input_image" else [PDF, IMAGE, AUDIO, *([VIDEO] if is_chat else [])]
    if medium not in taken:
        kinds = ", ".join("PDFs" if each is PDF else each.plural for each in taken)
        reject_unsupported(f"{where}.file_id", f"the file is {quote(content.plain_type)}; read are {kinds}")
    subtype, data = content.plain_type.rpartition("/")[2], base64.b64encode(content.data).decode()
    url = f"data:{medium.mime.replace('...', subtype or 'unknown')};base64,{data}"
    if medium is PDF:
        file["file_data"] = url
        return {**part, "file": file} if is_chat else file
    if is_chat:
        return {"type": medium.part, medium.part: {"url": url}}
    if medium is IMAGE:
        return {
            "type": "input_image",
            "image_url": url,
            **({"detail": file["detail"]} if "detail" in file else {}),
        }
    return {"type": "input_audio", "input_audio": {"data": data, "format": subtype}}


def _convert_source(part: Json, content: FileContent, where: str) -> Json:
    """A block of Anthropic's with an image, a PDF or a text."""
    for key in part["source"]:
        if key not in ("type", "file_id"):
            reject(f"{where}.{shorten(key)}", EXTRA, code=UNKNOWN)
    where = f"{where}.file_id"
    media_type = content.plain_type
    if part["type"] == "image" and media_type not in IMAGE_TYPES:
        reject(where, f"the file is {quote(media_type)}, which is none of {', '.join(IMAGE_TYPES)}")
    if part["type"] == "image" or media_type == PDF.mime:
        kind, data = "base64", base64.b64encode(content.data).decode()
    elif not media_type.startswith("text/"):
        reject_unsupported(where, f"the file is {quote(media_type)}, neither a PDF nor a text")
    else:
        try:
            kind, media_type, data = "text", "text/plain", content.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            reject(where, f"the file is not UTF-8 at byte {error.start}")
    return {**part, "source": {"type": kind, "media_type": media_type, "data": data}}
