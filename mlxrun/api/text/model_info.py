"""What the front ends need to know of a model. model/load/model_info.py implements it; tests use a fake.

Only `process` may be slow; it is called on a worker thread, never on the event loop. Nothing here is mlx. The
names that `model` of a body may have are here too: those of the model, and those of its LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mlxrun.config.media_settings import Video, VideoSampling
from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import quote
from mlxrun.core.request import LoraAdapter, PooledModel, ProcessedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image


class ModelInfo(Protocol):
    """A model without its weights: tokenizer, template, limits, image processor."""

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
        """The maximum number of tokens of prompt and answer together."""

    @property
    def vision(self) -> bool:
        """Whether the model accepts images."""

    @property
    def video_sampling(self) -> VideoSampling | None:
        """How the model's processor takes frames of a video; None if the model accepts no videos."""

    @property
    def refused_media(self) -> Mapping[str, str]:
        """Why images, videos or "images beside videos" are refused, as the load check found."""

    @property
    def defaults(self) -> Mapping[str, float]:
        """Sampling values of the model's generation_config.json; may be empty."""

    @property
    def name(self) -> str:
        """The model's name in responses."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use besides `name`; empty: any."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names that are accepted too, but not listed."""

    @property
    def digests(self) -> Mapping[str, str]:
        """sha256 of `model`, `tokenizer` and `template`."""

    @property
    def processor_digest(self) -> bytes:
        """A digest of how images become pixels; empty if the model accepts none."""

    @property
    def pooled(self) -> PooledModel | None:
        """How the model gives embeddings or scores; None: it only generates."""

    @property
    def adapters(self) -> Sequence[LoraAdapter]:
        """The LoRA adapters of which a request may choose one."""

    def process(self, text: str, images: Sequence[Image], videos: Sequence[Video] = ()) -> ProcessedPrompt:
        """Tokens and pixels of a rendered prompt with one placeholder per image and per video.
        Thread-safe."""


def choose_adapter(name: str | None, model_info: ModelInfo) -> LoraAdapter | None:
    """The adapter that `model` of a body names, as MODEL:NAME or NAME; None: the model as it is. NotFound for
    a name that is not served. A config without names and adapters serves any: clients have theirs built in.
    """
    own = (model_info.name, *model_info.names, *model_info.aliases)
    for adapter in model_info.adapters:
        if name == adapter.name or name in [f"{each}:{adapter.name}" for each in own]:
            return adapter
    if name is not None and (model_info.names or model_info.adapters) and name not in own:
        names = ", ".join(list_names(model_info))
        text = f"model: {quote(name)} is not served here; the names are {names}"
        raise NotFound(text, param="model", code="model_not_found")
    return None


def list_names(model_info: ModelInfo) -> tuple[str, ...]:
    """What `model` of a body may be, the real name first, those of adapters last."""
    adapters = (name_model(model_info, adapter) for adapter in model_info.adapters)
    return tuple(dict.fromkeys((model_info.name, *model_info.names, *adapters)))


def name_model(model_info: ModelInfo, adapter: LoraAdapter | None) -> str:
    """The name of the model in responses."""
    return model_info.name if adapter is None else f"{model_info.name}:{adapter.name}"
