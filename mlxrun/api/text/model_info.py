"""What the front ends need to know of a model; model/load/model_info.py implements it.

`process`, `summary` and a digest may be slow: call them on a worker thread. The names that the field `model`
of a body may have are here too: those of the model and of its LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mlxrun.config.media_settings import Audio, AudioSampling, Video, VideoSampling
from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import quote, suggest
from mlxrun.core.model_summary import ModelSummary
from mlxrun.core.request import LoraAdapter, PooledModel, ProcessedPrompt
from mlxrun.core.transcription import SpeechModel

if TYPE_CHECKING:
    from PIL.Image import Image


class ModelInfo(Protocol):
    """A model without its weights: tokenizer, template, limits, image processor."""

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers (PreTrainedTokenizerBase)."""

    @property
    def chat_template(self) -> str | None:
        """The template's Jinja source: the config's, else the model's own. None if there is neither."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer."""

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of prompt and answer together."""

    @property
    def vision(self) -> bool:
        """Whether the model accepts images."""

    @property
    def video_sampling(self) -> VideoSampling | None:
        """How the model's processor chooses the frames of a video; None if the model accepts no videos."""

    @property
    def audio_sampling(self) -> AudioSampling | None:
        """How the model takes audio; None if it accepts none."""

    @property
    def refused_media(self) -> Mapping[str, str]:
        """The reasons of the load check to refuse "images" or "images beside videos" (media_names.py)."""

    @property
    def defaults(self) -> Mapping[str, float]:
        """The sampling values of the model's generation_config.json; may be empty."""

    @property
    def name(self) -> str:
        """The model's name in responses."""

    @property
    def names(self) -> tuple[str, ...]:
        """Other names that requests may use; if there are none, and no adapters, requests may use any."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """More names that requests may use, which /v1/models does not list."""

    @property
    def digests(self) -> Mapping[str, str]:
        """The SHA-256 of `model`, `tokenizer` and `template`."""

    @property
    def summary(self) -> ModelSummary:
        """The model's files in numbers. The first call reads the headers of its weights."""

    @property
    def processor_digest(self) -> bytes:
        """A digest of the settings that turn images into pixels; empty if the model accepts no images."""

    @property
    def pooled(self) -> PooledModel | None:
        """How the model gives embeddings or scores; None if it only generates."""

    @property
    def speech(self) -> SpeechModel | None:
        """How the model transcribes sound; None if it does not. One that does, does nothing else."""

    @property
    def generates(self) -> bool:
        """Whether the model answers prompts."""

    @property
    def adapters(self) -> Sequence[LoraAdapter]:
        """The LoRA adapters; a request may choose one."""

    def process(
        self, text: str, images: Sequence[Image], videos: Sequence[Video] = (), audio: Sequence[Audio] = ()
    ) -> ProcessedPrompt:
        """Return the tokens and pixels of a rendered prompt, which has one placeholder for each image, video
        and audio. Thread-safe."""


def choose_adapter(name: str | None, model_info: ModelInfo) -> LoraAdapter | None:
    """Return the adapter that the field `model` names as MODEL:NAME or NAME; None: no adapter.

    NotFound if the name is not served. A config without names and adapters serves any name, since clients
    have theirs built in. An empty name is none."""
    own = _list_own_names(model_info)
    for adapter in model_info.adapters:
        if name in _list_adapter_names(adapter, own):
            return adapter
    if name and (model_info.names or model_info.adapters) and name not in own:
        names = list_names(model_info)
        near = suggest(name, names)
        text = f"model: {quote(name)} is not served here{near}; the names are {', '.join(names)}"
        raise NotFound(text, param="model", code="model_not_found")
    return None


def list_accepted_names(model_info: ModelInfo) -> tuple[str, ...]:
    """List all names that `choose_adapter` accepts where names are checked."""
    own = _list_own_names(model_info)
    return (*own, *(name for each in model_info.adapters for name in _list_adapter_names(each, own)))


def _list_own_names(model_info: ModelInfo) -> tuple[str, ...]:
    return (model_info.name, *model_info.names, *model_info.aliases)


def _list_adapter_names(adapter: LoraAdapter, own: Sequence[str]) -> list[str]:
    return [adapter.name, *(f"{each}:{adapter.name}" for each in own)]


def list_names(model_info: ModelInfo) -> tuple[str, ...]:
    """List the names that the field `model` may have: the model's own first, those of adapters last."""
    adapters = (name_model(model_info, adapter) for adapter in model_info.adapters)
    return tuple(dict.fromkeys((model_info.name, *model_info.names, *adapters)))


def name_model(model_info: ModelInfo, adapter: LoraAdapter | None) -> str:
    """Return the name of the model in responses."""
    return model_info.name if adapter is None else f"{model_info.name}:{adapter.name}"
