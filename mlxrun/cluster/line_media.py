"""Images, PDFs and videos that a line names by their paths, sent with the line to workers without its folder.

The files are read as the line would read them: below `media.roots`, and not larger than allowed. What cannot
be read stays a path, and the worker refuses it by name.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlxrun.api.text.media.media_kinds import IMAGE, PDF, VIDEO, Medium
from mlxrun.api.text.media.media_sources import MediaSources
from mlxrun.core.errors import MediaError
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import find_local_images, is_local_path

_FIELDS = ("messages", "input")
_IMAGE, _PDF, _VIDEO = (IMAGE, "image/png"), (PDF, "application/pdf"), (VIDEO, "video/mp4")
_KEYS = {  # of dicts that name a file, in the places that `find_local_images` knows
    "image_url": _IMAGE,
    "video_url": _VIDEO,
    "file_data": _PDF,
    "file_url": _PDF,
}


def inline_media(line: JobLine, sources: MediaSources) -> JobLine:
    """The line with data URLs in place of paths; the same line if it has none. Blocks while files are
    read."""
    if not any(True for name in _FIELDS for _ in find_local_images(line.body.get(name))):
        return line

    def read(url: str, kind: tuple[Medium, str]) -> str:
        if not is_local_path(url):
            return url
        try:
            data = sources.read_local(url, kind[0])
        except MediaError:
            return url
        return f"data:{kind[1]};base64,{base64.b64encode(data).decode()}"

    body = {name: _replace(value, read) if name in _FIELDS else value for name, value in line.body.items()}
    return replace(line, body=body)


def _replace(value: Any, read: Callable[[str, tuple[Medium, str]], str]) -> Any:
    """A copy of messages or items in which the media are those that `read` returns."""
    if isinstance(value, list):
        return [_replace(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    found = dict(value)
    for name, kind in _KEYS.items():
        given = value.get(name)
        if isinstance(given, str):
            found[name] = read(given, kind)
        elif isinstance(given, dict) and isinstance(given.get("url"), str):
            found[name] = {**given, "url": read(given["url"], kind)}
    for name in ("file", "content", "output"):
        if isinstance(value.get(name), (list, dict)):
            found[name] = _replace(value[name], read)
    return found
