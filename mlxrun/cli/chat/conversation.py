"""The messages of a conversation, and the files that a message names."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import ConfigError

# Also those that the server does not read, which says so.
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif")
PDF = ".pdf"
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
SOUNDS = (".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac")
MEDIA = (*IMAGES, PDF, *VIDEOS, *SOUNDS)
MAX_FILE = 100_000_000  # bytes
_MARKS = "?!.,:;()[]\"'"  # of a sentence


class Conversation:
    """Messages as /v1/chat/completions takes them. `system`: the first one, if there is any."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def ask(self, text: str, files: Sequence[Path] = ()) -> None:
        """Add a question. ConfigError for a file that cannot be read."""
        content: Any = text
        if files:
            content = [*map(read_attachment, files), {"type": "text", "text": text}]
        self.turns.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        """Add the answer to the last question."""
        self.turns.append({"role": "assistant", "content": text})

    def undo(self) -> None:
        """Remove the last question with its answer."""
        while self.turns and self.turns.pop()["role"] != "user":
            pass

    def forget_answer(self) -> bool:
        """Remove the last answer, so that its question can be asked again; whether there was a question."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        return bool(self.turns)

    def save(self, path: Path) -> None:
        """Write the messages as JSON. ConfigError if that fails, or if it would replace media."""
        if path.suffix.lower() in MEDIA and path.exists():
            raise ConfigError(
                f"{path} is not replaced: it is an image, a PDF, a video or sound; name another file"
            )
        try:
            text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
            write_atomically(path, text.encode(errors="backslashreplace"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Go on with messages that `save` wrote. ConfigError if these are none."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not a conversation: {error}") from error
        if not isinstance(found, list) or not found or not all(map(_is_message, found)):
            raise ConfigError(f"{path} is not a conversation: it has no list of messages")
        has_system = found[0]["role"] == "system"
        self.system = found[0]["content"] if has_system else None
        self.turns = found[1:] if has_system else found


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def find_attachments(text: str) -> list[Path]:
    """The images, PDFs, videos and sounds that a question names, each by its path as a terminal has it. Marks
    around a path, such as that of a question, are no part of it if there is no such file."""
    return list(dict.fromkeys(path for _, path in _find_media(text) if path is not None))


def find_missing(text: str) -> list[str]:
    """The names of images, PDFs, videos and sounds in a question of which there is no file."""
    return list(dict.fromkeys(name for name, path in _find_media(text) if path is None))


def _find_media(text: str) -> Iterator[tuple[str, Path | None]]:
    """Yield each word that ends as the name of a medium, without marks, and its file, if there is one."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe is no quotation
        words = text.split()
    for word in words:
        paths = [Path(os.path.expanduser(name)) for name in (word, word.strip(_MARKS))]
        media = [path for path in paths if path.suffix.lower() in MEDIA]
        if media:
            yield word.strip(_MARKS), next(filter(Path.is_file, media), None)


def read_attachment(path: Path) -> dict[str, Any]:
    """The part of a message with the content of a file. ConfigError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"{path} has more than {MAX_FILE:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    part = find_part(path)
    # A machine without a list of types knows few; the server needs only the part before the slash.
    family = "application" if part == "file" else part.removesuffix("_url")
    kind = mimetypes.guess_type(path.name)[0] or f"{family}/{path.suffix[1:].lower()}"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    if part == "file":
        return {"type": part, part: {"file_data": url, "filename": path.name}}
    return {"type": part, part: {"url": url}}


def find_part(path: Path) -> str:
    """The type of the part of a message that an attachment becomes."""
    suffix = path.suffix.lower()
    if suffix == PDF:
        return "file"
    return "video_url" if suffix in VIDEOS else "audio_url" if suffix in SOUNDS else "image_url"
