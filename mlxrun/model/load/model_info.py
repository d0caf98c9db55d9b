"""The part of a model without weights: tokenizer, template, limits and processor of media.

Front ends prepare prompts with it on any thread while the engine thread computes; `--dry-run` needs nothing
else. It implements mlxrun.api.text.model_info.ModelInfo.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.config.media_settings import AudioSampling, VideoSampling
from mlxrun.config.settings import ModelSettings
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.core.media_names import KINDS, PLURALS, MediaKind
from mlxrun.core.model_summary import ModelSummary
from mlxrun.core.request import LoraAdapter, PooledModel, ProcessedPrompt
from mlxrun.core.transcription import SpeechModel
from mlxrun.model.load.gguf.architectures import check_tensor_types, make_config
from mlxrun.model.load.gguf.header import GgufHeader, read_header
from mlxrun.model.load.gguf.tokenizer import make_tokenizer
from mlxrun.model.load.model_digests import digest_adapter, make_digests, stamp_files
from mlxrun.model.load.model_facts import (
    GENERATION,
    ModelKind,
    choose_kind,
    collect_eos_ids,
    read_context_length,
    read_sampling_defaults,
    read_template,
    summarize_model,
)
from mlxrun.model.load.model_files import (
    UNREAD_FILES,
    check_architecture,
    check_remote_code,
    check_small_files,
    count_file_bytes,
    find_model_folder,
    list_weight_files,
    read_json,
)
from mlxrun.model.load.processor_files import digest_processor, load_processor
from mlxrun.model.load.tensor_files import check_shards, name_file_errors
from mlxrun.model.load.tokenizer_files import load_tokenizer
from mlxrun.model.load.weight_check import check_config, check_sizes
from mlxrun.model.lora import check_adapter_files
from mlxrun.model.pooling.pooled_model import is_encoder, read_pooled_model
from mlxrun.model.transcription.speech_files import read_speech_model
from mlxrun.model.vision.media_processing import call_processor, make_prompt
from mlxrun.model.vision.media_sampling import read_audio_sampling, read_video_sampling

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModelInfo:
    """A model without its weights.

    `digests`: identify the contents of its files; one may take seconds when it is first needed. `gguf`: the
    header, if `folder` is a GGUF file. `kind_note`: why the model takes no images although its config has
    them. `refused_media`: filled when the model is loaded, for all who prepare prompts with this object.
    `stamps`: of its files, before anything was read of them (stamp_files).
    """

    folder: Path
    config: Mapping[str, Any]
    tokenizer: Any
    chat_template: str | None
    eos_ids: frozenset[int]
    context_length: int
    vision: bool
    defaults: Mapping[str, float]
    name: str
    names: tuple[str, ...]
    digests: Mapping[str, str]
    processor: Any = None
    processor_digest: bytes = b""
    aliases: tuple[str, ...] = ()
    pooled: PooledModel | None = None
    speech: SpeechModel | None = None
    generates: bool = True
    video_sampling: VideoSampling | None = None
    audio_sampling: AudioSampling | None = None
    adapters: tuple[LoraAdapter, ...] = ()
    gguf: GgufHeader | None = None
    kind_note: str = ""
    refused_media: dict[str, str] = field(default_factory=dict)
    stamps: Mapping[Path, tuple[int, int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def summary(self) -> ModelSummary:
        """See mlxrun.api.text.model_info.ModelInfo."""
        return summarize_model(self.folder, self.config, self.gguf)

    def list_sampled(self) -> list[MediaKind]:
        """The kinds of media that the model takes besides images."""
        sampled = {"video": self.video_sampling, "audio": self.audio_sampling}
        return [kind for kind in KINDS if sampled.get(kind) is not None]

    def process(
        self,
        text: str,
        images: Sequence[Any],
        videos: Sequence[Any] = (),
        audio: Sequence[Any] = (),
    ) -> ProcessedPrompt:
        """Tokens and pixels of a rendered prompt with one placeholder for each image, video and audio.
        Thread-safe. MediaError if the processor refuses them."""
        with self._lock:  # a processor keeps padding settings on its tokenizer
            arrays = call_processor(self.processor, self.config, text, images, videos, audio)
        return make_prompt(self.processor, self.config, self.processor_digest, arrays, images, videos, audio)


def load_model_info(
    settings: ModelSettings, weights: bool = False, *, announce: bool = True, digest: bool = True
) -> LoadedModelInfo:
    """Load everything except the weights.

    `weights`: also download them if the model comes from the hub. `announce`: log that they are about to be
    loaded; else `log_weights` does it later. `digest`: read the files for their digests now, not when one is
    first needed, perhaps on a thread that must not wait. The draft model's files are always read later.
    ModelLoadError or ConfigError for files that cannot be used.
    """
    folder = find_model_folder(settings, weights)
    with name_file_errors(folder):
        return _load_folder(settings, folder, weights, announce, digest)


def _load_folder(
    settings: ModelSettings, folder: Path, weights: bool, announce: bool, digest: bool
) -> LoadedModelInfo:
    """As `load_model_info`, of the model in a folder or a GGUF file."""
    stamps = stamp_files(settings, folder)
    gguf = read_header(folder) if folder.is_file() else None
    if gguf is None:
        check_small_files(folder)
    if weights and announce:
        log_weights(settings, folder)
    if gguf is None:
        config, kind = _read_folder(settings, folder, weights)
    else:
        config, kind = _read_gguf(settings, gguf, folder), ModelKind(False)
    digests = make_digests(settings, folder, gguf, weights)
    if digest:
        digests.begin("model")  # while the tokenizer is imported and made
    generation = {} if gguf is not None else read_json(folder / GENERATION)
    tokenizer = load_tokenizer(folder, settings) if gguf is None else make_tokenizer(gguf)
    own_name = _get_own_name(settings, folder)
    template = read_template(folder, settings, tokenizer)
    speech = read_speech_model(folder, config, settings)
    pooled = None if speech is not None else read_pooled_model(folder, config, settings, tokenizer)
    generates = speech is None and (pooled is None or pooled.generates)
    adaptable = speech is None and not is_encoder(config)
    processor = load_processor(folder, config, settings) if kind.vision else None
    digests.add_template(template)
    if digest:
        digests["model"]
    return LoadedModelInfo(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        chat_template=template,
        eos_ids=collect_eos_ids(folder, config, generation, tokenizer),
        context_length=_get_context_length(settings, config, pooled, speech),
        vision=kind.vision,
        defaults=read_sampling_defaults(folder, generation),
        name=settings.names[0] if settings.names else own_name,
        names=(*settings.names, own_name) if settings.names else (),
        aliases=(settings.path,),
        pooled=pooled,
        speech=speech,
        generates=generates,
        digests=digests,
        adapters=_read_adapters(settings, own_name, adaptable=adaptable, generates=generates),
        gguf=gguf,
        kind_note=kind.note,
        refused_media=dict.fromkeys(PLURALS.values(), kind.note) if kind.note else {},
        processor=processor,
        video_sampling=read_video_sampling(processor, config) if kind.vision else None,
        audio_sampling=read_audio_sampling(processor, config) if kind.vision else None,
        processor_digest=digest_processor(folder) if kind.vision else b"",
        stamps=stamps,
    )


def _get_context_length(
    settings: ModelSettings,
    config: Mapping[str, Any],
    pooled: PooledModel | None,
    speech: SpeechModel | None,
) -> int:
    usual = read_context_length(settings, config)
    if speech is not None:
        return speech.context_length
    return usual if pooled is None or pooled.generates else pooled.max_tokens


def _read_folder(settings: ModelSettings, folder: Path, weights: bool) -> tuple[dict[str, Any], ModelKind]:
    """The config of a model folder, checked, and whether it is loaded as a text model. `weights`: they are
    there too."""
    if weights:
        if not list_weight_files(folder):
            others = f", and {UNREAD_FILES} are not read" if any(folder.glob("*.safetensors")) else ""
            raise ModelLoadError(f"no *.safetensors in {folder}{others}: the model has no weights")
        check_shards(folder)
    config = read_json(folder / "config.json")
    check_architecture(config, folder)
    check_remote_code(settings, config, folder)
    if weights:
        check_config(config, folder)
    return config, choose_kind(settings, config, folder)


def _read_gguf(settings: ModelSettings, gguf: GgufHeader, file: Path) -> dict[str, Any]:
    """The config of a GGUF file, checked."""
    check_tensor_types(gguf)
    config = make_config(gguf)
    check_sizes(config, {name: tensor.shape for name, tensor in gguf.tensors.items()}, file)
    if settings.kind != "text" and settings.kind != "auto":  # a vision tower is in a file of its own
        raise ModelLoadError(f"model.kind: {settings.kind}, but GGUF files are loaded as text models only")
    return config


def log_weights(settings: ModelSettings, folder: Path) -> None:
    """Log which weights are about to be loaded, and their size. `folder`: of the model's info."""
    name, size = _get_own_name(settings, folder), format_rounded(count_file_bytes(folder))
    log.info("loading %s from %s, %s of weights", name, folder, size)


def _read_adapters(
    settings: ModelSettings, own_name: str, *, adaptable: bool, generates: bool
) -> tuple[LoraAdapter, ...]:
    """The adapters of which requests choose; ConfigError for what cannot be one. `adaptable`: whether the
    model can be computed with one."""
    if not adaptable and (settings.adapters or settings.adapter is not None):
        setting = "model.adapters" if settings.adapters else "model.adapter"
        raise ConfigError(f"{setting}: encoders and models that transcribe take no adapters")
    if settings.adapters and not generates:
        raise ConfigError("model.adapters: only models that generate have several; set model.adapter")
    if settings.adapter is not None:
        check_adapter_files("model.adapter", settings.adapter)
    found = []
    for name, path in settings.adapters.items():
        if name == own_name:
            raise ConfigError(f"model.adapters: {name}: the model itself has this name; choose another")
        check_adapter_files(f"model.adapters: {name}", path)
        found.append(LoraAdapter(name, digest_adapter(Path(path))))
    return tuple(found)


def _get_own_name(settings: ModelSettings, folder: Path) -> str:
    """The model's own name: the hub id, or the name of the folder or of the GGUF file."""
    path = expand_home(settings.path)
    if path.is_file():
        return path.stem
    return folder.resolve().name if path.is_dir() else settings.path
