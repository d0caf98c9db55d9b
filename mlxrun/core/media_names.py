"""The kinds of media that models take, and the names of what a model may refuse: a kind, or two of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Literal, Protocol

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audio"}
# Pairs in a prompt that a library may compute otherwise than each alone. Several images are not among them:
# they are computed as the library does.
MEDIA_PAIRS: tuple[tuple[MediaKind, MediaKind], ...] = (
    *itertools.combinations(KINDS, 2),
    ("audio", "audio"),
)


class MediaTaker(Protocol):
    """What a model says of the media that it takes; see mlxrun.api.text.model_info.ModelInfo."""

    @property
    def vision(self) -> bool: ...

    @property
    def video_sampling(self) -> object | None: ...

    @property
    def audio_sampling(self) -> object | None: ...

    @property
    def refused_media(self) -> Mapping[str, str]: ...


def list_input_kinds(model: MediaTaker) -> list[MediaKind]:
    """List the media that prompts of a model may have. What it refuses is left out."""
    takes = zip(KINDS, (model.vision, model.video_sampling, model.audio_sampling), strict=True)
    return [kind for kind, is_taken in takes if is_taken and PLURALS[kind] not in model.refused_media]


def describe_input(model: MediaTaker) -> str:
    """Return what prompts of a model may have: "images, audio and text"."""
    found = [PLURALS[kind] for kind in list_input_kinds(model)]
    return f"{', '.join(found)} and text" if found else "text"


def name_pair(one: MediaKind, other: MediaKind) -> str:
    """Return what a model may refuse: "images beside videos". The kinds are in the order of KINDS."""
    return f"{PLURALS[one]} beside {PLURALS[other]}"


def list_refusable(kinds: list[MediaKind]) -> list[str]:
    """List what a prompt with media of these kinds has that a model may refuse. `kinds`: one of each
    medium."""
    shown = [kind for kind in KINDS if kind in kinds]
    pairs = [pair for pair in MEDIA_PAIRS if not Counter(pair) - Counter(kinds)]
    return [*(PLURALS[kind] for kind in shown), *(name_pair(*pair) for pair in pairs)]


def describe_refusal(name: str, why: str) -> str:
    """Return the error of a prompt that has what the model refuses. `name`: one of `list_refusable`."""
    verb = "is" if name.startswith("audio") else "are"
    return f"{name} {verb} refused for this model: {why}"
