"""The kinds of media in requests: images, videos, audio and PDFs, and which of them a model takes.

Each kind is declared here once: its part in a message, its limits, and the code of its errors. A kind that
the model does not take is refused before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.media_settings import MediaSettings
from mlxrun.core.errors import MediaError
from mlxrun.core.field_errors import reject
from mlxrun.core.media_names import PLURALS, MediaKind, describe_refusal, list_refusable

PDF_START = b"%PDF-"
BASE64_PDF = "JVBERi0"  # how a PDF in base64 begins, which `file_data` may be without "data:" before it


@dataclass(frozen=True, slots=True)
class MediaLimit:
    """A setting that limits something, such as the bytes of a file. `name`: its full name in the config."""

    name: str
    size: int

    def check(self, size: int) -> None:
        """Raise MediaError if `size` is more than the limit."""
        if size > self.size:
            raise MediaError(f"it has more than {self.name} ({self.size})")


@dataclass(frozen=True, slots=True)
class Medium:
    """One kind of media. `part`: the type of its part in a message, and the field inside. `fields`: the known
    fields of that, the one with the URL first. `template_part`: the type of the part that templates get; a
    PDF has one for each page. `mime`: the MIME type of its data URLs; "..." stands for any rest. `max_bytes`,
    `max_count`: the names of its settings."""

    part: str
    fields: tuple[str, ...]
    template_part: MediaKind
    mime: str
    code: str  # of errors about a broken, missing or refused one
    max_bytes: str = "max_bytes"  # settings in media
    max_count: str = ""  # empty: the loader counts its pages

    @property
    def plural(self) -> str:
        """What models take it as: "images", "videos" or "audio"."""
        return PLURALS[self.template_part]

    def find_limit(self, settings: MediaSettings, name: str) -> MediaLimit:
        """Return the limit of its setting `max_bytes` or `max_count`."""
        setting = getattr(self, name)
        return MediaLimit(f"media.{setting}", getattr(settings, setting))


IMAGE = Medium("image_url", ("url", "detail"), "image", "image/...", MediaError.code, max_count="max_images")
VIDEO = Medium(
    "video_url", ("url",), "video", "video/...", "invalid_video", "video_max_bytes", max_count="max_videos"
)
AUDIO = Medium(
    "audio_url", ("url",), "audio", "audio/...", "invalid_audio", "audio_max_bytes", max_count="max_audio"
)
PDF = Medium("file", ("file_data", "file_id", "filename"), "image", "application/pdf", "invalid_document")
MEDIA = (IMAGE, VIDEO, AUDIO, PDF)
# How files of sounds begin, and the names of their kinds.
_SOUNDS = {
    b"RIFF": "wav",
    b"OggS": "ogg",
    b"fLaC": "flac",
    b"\x1aE\xdf\xa3": "webm",
    **dict.fromkeys((b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"), "mpeg"),
}


def find_sound_kind(data: bytes) -> str | None:
    """The kind of a sound's file by its beginning, as MIME types name it; None if it is not known."""
    kind = next((name for start, name in _SOUNDS.items() if data.startswith(start)), None)
    return "mp4" if data[4:8] == b"ftyp" else kind


_PICTURE = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0|MM\0\*|RIFF.{4}WEBP|.{4}ftyp(?:avi|hei|mif)", re.DOTALL
)
# What files with sound begin with too, if they have pictures that move: AVI, and the tracks of MP4 and WebM.
_FILM = re.compile(rb"^RIFF.{4}AVI |hdlr.{8}vide|\x86.V_", re.DOTALL)


def find_medium(data: bytes, media_type: str) -> Medium | None:
    """The kind of media of a file, by its content, else by its media type; None if it is of no kind."""
    if data.startswith(PDF_START):
        return PDF
    if _PICTURE.match(data):
        return IMAGE
    if find_sound_kind(data) is not None:
        return VIDEO if _FILM.search(data) else AUDIO
    return find_named_medium(media_type)


def find_named_medium(media_type: str) -> Medium | None:
    """The kind of media that a media type, in lower case, is of; None if it is of no kind."""
    return next((each for each in MEDIA if media_type.startswith(each.mime.removesuffix("..."))), None)


@dataclass(frozen=True, slots=True)
class MediaRef:
    """An image, a video, a PDF or audio of a message. `param`: the path of the field with its URL."""

    url: str
    param: str
    medium: Medium = IMAGE


def check_model_takes(refs: Sequence[MediaRef], model: ModelInfo) -> None:
    """Raise RequestError for the first image, PDF, video or audio that the model does not take, or that the
    load check has refused."""
    takes: dict[MediaKind, Any] = {
        "image": True,
        "video": model.video_sampling,
        "audio": model.audio_sampling,
    }
    kinds = [ref.medium.template_part for ref in refs]
    pairs = set(list_refusable(kinds)) - set(PLURALS.values())
    for ref, kind in zip(refs, kinds, strict=True):
        name = PLURALS[kind]
        if not model.vision or takes[kind] is None:
            pages = ", which the pages of a PDF become; send its text" if ref.medium is PDF else ""
            known = f": {model.refused_media[name]}" if name in model.refused_media else pages
            reject(ref.param, f"the model {model.name!r} does not accept {name}{known}")
        for each in (name, *(pair for pair in sorted(pairs) if name in pair.split(" beside "))):
            if why := model.refused_media.get(each):
                reject(ref.param, describe_refusal(each, why))
    sampling = model.audio_sampling
    if sampling is not None and not sampling.several and kinds.count("audio") > 1:
        second = [ref for ref in refs if ref.medium is AUDIO][1]
        reject(second.param, f"the processor of {model.name!r} takes one audio part in a prompt")
