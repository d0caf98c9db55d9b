"""What the text side needs to know of a model. model/model_info.py builds it; tests use a fake.

Only `process` may be slow; it is called on a worker thread, never on the event loop. Nothing here is mlx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image


class ProcessedPromptInterface(Protocol):
    """A prompt with images as the model's own processor sees it."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Every token, image placeholders expanded."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of `ids` that images fill, in order, never overlapping."""

    @property
    def media(self) -> Any:
        """What the runner needs to embed the images: numpy only, opaque here."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """For each span, a digest of all that decides what fills it."""


class ModelInfo(Protocol):
    """The model as the host sees it: tokenizer, template, limits, image processor."""

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers (PreTrainedTokenizerBase)."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source, already resolved (config before the model's own); None: the model has none."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def vision(self) -> bool:
        """Whether images can be given."""

    @property
    def defaults(self) -> Mapping[str, float]:
        """Sampling values of the model's generation_config.json; may be empty."""

    @property
    def name(self) -> str:
        """The model's name in responses."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give besides `name`; empty: any."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names that are taken too, but not shown in lists."""

    def process(self, text: str, images: Sequence[Image]) -> ProcessedPromptInterface:
        """Tokens and pixels of a rendered prompt with one placeholder an image, at least one. Thread-safe."""
