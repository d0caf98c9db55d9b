"""Loads a model's weights: text models with mlx-lm, vision models with mlx-vlm. On the engine thread only.

The model of `model.draft` is loaded here too. Its files are checked first (`load_draft_info`), before its
large target is loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrun.config.media_settings import get_feature_bytes
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.model.hooks.adapted_layers import RowAdapters
from mlxrun.model.hooks.install import install_hooks
from mlxrun.model.hooks.product_timing import ProductTimes
from mlxrun.model.hooks.weight_form import WeightForm
from mlxrun.model.load.gguf.architectures import load_gguf_model
from mlxrun.model.load.load_progress import evaluate_parameters
from mlxrun.model.load.model_digests import digest_adapter, digest_own_files, stamp_files
from mlxrun.model.load.model_files import find_text_config, make_draft_settings, name_draft
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info, log_weights
from mlxrun.model.load.tensor_files import name_file_errors
from mlxrun.model.load.weight_check import check_loading
from mlxrun.model.lora import apply_adapter, read_adapters
from mlxrun.model.machine.device import StreamSpread, limit_buffers
from mlxrun.model.pooling.pooled_model import get_trunk_classes
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller, run_trial_forward


def load_caller(config: Config, info: LoadedModelInfo, seconds: ProductTimes | None = None) -> ModelCaller:
    """Load the model, install its hooks, and evaluate its weights. ModelLoadError or ConfigError if it cannot
    be loaded. `seconds`: times of its products, if they are known."""
    settings = config.model
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model, unused, dtype = load_lazily(settings, info)
    with name_file_errors(info.folder):
        adapters = read_adapters(model, settings.adapters, vision=info.vision)
    rows = RowAdapters(tuple(settings.adapters), row_by_row=config.engine.reproducible)
    wanted = dtype or find_dtype(model)
    form, hooks = install_hooks(model, config, wanted, rows, adapters, dtype, info.config, seconds)
    form = replace(form, unused=unused)
    evaluate_parameters(model, info.name)
    check_digests(settings, info)
    limit_buffers(config.scheduler.memory_limit)
    caller = make_caller(config, info, model, form, rows)
    caller.hooks = hooks
    return caller


def load_lazily(
    settings: ModelSettings, info: LoadedModelInfo
) -> tuple[Any, tuple[str, ...], mx.Dtype | None]:
    """The library's model, whose weights are not read yet, and the names of those that it does not use. Last,
    the type to which they are cast; None: as in the files. ModelLoadError or ConfigError as `load_caller`."""
    with name_file_errors(info.folder):
        model, unused = _load_vision(settings, info) if info.vision else _load_text(settings, info)
        if settings.adapter is not None:
            model = apply_adapter(model, settings.adapter, vision=info.vision)
    dtype = choose_dtype(settings)
    if dtype is None and info.gguf is not None:
        # Norms are in float32 beside matrices in float16; mixed, every activation would become float32.
        is_bfloat = any(tensor.type == "BF16" for tensor in info.gguf.tensors.values())
        dtype = mx.bfloat16 if is_bfloat else find_dtype(model)
    if dtype is not None:
        _cast_parameters(model, dtype)
    model.eval()
    return model, unused, dtype


def _cast_parameters(model: Any, dtype: mx.Dtype) -> None:
    """As `set_dtype` of the library's model, on several streams."""

    def is_floating(array: mx.array) -> bool:
        return mx.issubdtype(array.dtype, mx.floating)

    nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()) if is_floating(array))
    spread = StreamSpread(nbytes)

    def cast(array: mx.array) -> mx.array:
        return array.astype(dtype, stream=spread.choose(array.nbytes)) if is_floating(array) else array

    model.apply(cast)


def make_caller(
    config: Config, info: LoadedModelInfo, model: Any, form: WeightForm, rows: RowAdapters
) -> ModelCaller:
    """The caller of a library's model."""
    if not info.vision:
        return ModelCaller(model, form, rows)
    # Features of images are reused bit by bit only where all images of a prompt are the same.
    exact_sets_only = config.engine.reproducible
    line_break = getattr(info.processor, "image_break_token_id", None)
    features = get_feature_bytes(config.cache.image_bytes, config.scheduler.memory_limit)
    return VisionModelCaller(model, features, exact_sets_only, line_break, form, rows)


def check_digests(settings: ModelSettings, info: LoadedModelInfo) -> None:
    """ModelLoadError, or ConfigError for an adapter, if the files that were read are not those of their
    digests any more. Caches and jobs would keep what they compute under the name of other weights."""
    if stamp_files(settings, info.folder) != info.stamps:  # else nothing is read again
        found = digest_own_files(settings, info.folder, info.gguf)
        if any(found[name] != info.digests[name] for name in found):
            text = "its files were changed after they had been read for their digests; start again"
            raise ModelLoadError(f"{info.folder}: {text}")
    for adapter in info.adapters:
        folder = settings.adapters[adapter.name]
        if digest_adapter(Path(folder)) != adapter.digest:
            text = f"the files of {folder} were changed while the model was loaded; start again"
            raise ConfigError(f"model.adapters: {adapter.name}: {text}")


def find_dtype(model: Any) -> mx.Dtype:
    """The type of activations: that of most floating-point parameters of the language model. Those of LoRA
    adapters do not count, as they are in float32 whatever the model's type is."""
    parameters = tree_flatten(getattr(model, "language_model", model).parameters())
    dtypes = [array.dtype for name, array in parameters if ".lora_" not in name]
    found = Counter(dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating))
    return found.most_common(1)[0][0] if found else mx.bfloat16


def _load_text(settings: ModelSettings, info: LoadedModelInfo) -> tuple[Any, tuple[str, ...]]:
    """The model, and the names of weights that it does not use."""
    from mlx_lm.utils import _get_classes, load_model

    unused: Sequence[str] = ()
    if info.gguf is not None:
        model, unused = load_gguf_model(info.folder, info.config)
    elif "model_file" in info.config:
        model, _ = load_model(info.folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    else:
        is_trunk = info.pooled is not None and not info.pooled.generates
        classes = get_trunk_classes if is_trunk else _get_classes
        with check_loading(_get_classes(dict(info.config))[0], info.folder, _is_tied(info)) as unused:
            model, _ = load_model(info.folder, lazy=True, get_model_classes=classes)
    return model, tuple(unused)


def _load_vision(settings: ModelSettings, info: LoadedModelInfo) -> tuple[Any, tuple[str, ...]]:
    """As `_load_text`."""
    from mlx_vlm.utils import get_model_and_args, load_model

    unused: Sequence[str] = ()
    if "model_file" in info.config:
        model = load_model(info.folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    else:
        module, _ = get_model_and_args(dict(info.config))
        with check_loading(module.Model, info.folder, _is_tied(info)) as unused:
            model = load_model(info.folder, lazy=True)
    return model, tuple(unused)


def _is_tied(info: LoadedModelInfo) -> bool:
    sources = (info.config, find_text_config(info.config))
    return any(source.get("tie_word_embeddings") for source in sources)


def choose_dtype(settings: ModelSettings) -> mx.Dtype | None:
    """The dtype to cast to; None keeps the file's. Half precision is several times slower on a CPU."""
    if settings.dtype == "auto":
        return mx.float32 if mx.default_device() == mx.cpu else None
    return {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[settings.dtype]


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A loaded draft model. `cache`: of two tokens, for its shapes."""

    caller: ModelCaller
    info: LoadedModelInfo
    cache: list[Any]

    def make_error(self, problem: str) -> ConfigError:
        """The ConfigError that this model cannot be used. `problem`: a clause with the model as its
        subject."""
        return ConfigError(f"model.draft: {self.info.name} {problem}")


def load_draft_info(settings: ModelSettings, model_info: LoadedModelInfo) -> LoadedModelInfo:
    """The model of `model.draft` without its weights. ConfigError if its files show that it cannot be loaded,
    or that it does not fit the target (`model_info`)."""
    with name_draft():
        info = load_model_info(make_draft_settings(settings), weights=True, announce=False, digest=False)
    problem = _compare_vocabularies(model_info.tokenizer, info.tokenizer)
    if problem is not None:
        raise ConfigError(f"model.draft: {settings.draft} {problem}")
    return info


def load_small_model(config: Config, model_info: LoadedModelInfo, draft: LoadedModelInfo) -> SmallModel:
    """Load the draft model of the target `model_info`. ConfigError if it cannot be loaded."""
    own = make_draft_settings(config.model)
    log_weights(own, draft.folder)
    with name_draft():
        caller = load_caller(replace(config, model=own), draft)
        cache, width = run_trial_forward(caller)
    model = SmallModel(caller, draft, cache)
    if width <= max(model_info.tokenizer.get_vocab().values()):
        raise model.make_error(f"has logits of {width} tokens, and the tokenizer more")
    return model


def _compare_vocabularies(target: Any, draft: Any) -> str | None:
    """Why the same ids are not the same tokens for both models' tokenizers."""
    mine, other = target.get_vocab(), draft.get_vocab()
    differing = sorted(token for token in mine.keys() | other.keys() if mine.get(token) != other.get(token))
    if not differing:
        return None
    return f"has another vocabulary: {len(differing)} tokens differ, such as {differing[0]!r:.40}"
