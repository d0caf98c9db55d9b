"""Loads a model's weights: text models with mlx-lm, vision models with mlx-vlm. On the engine thread only."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.errors import ModelLoadError
from mlxrun.model.adapter import Adapter, VisionAdapter
from mlxrun.model.load_progress import evaluate_parameters
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.ragged import attention
from mlxrun.model.weight_form import settle_weights

log = logging.getLogger(__name__)


def load_adapter(config: Config, info: LoadedModelInfo) -> Adapter:
    """The model with its weights evaluated, their form settled and its attention routed."""
    settings = config.model
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not any(info.folder.glob("*.safetensors")):
        raise ModelLoadError(f"no *.safetensors in {info.folder}: the model has no weights")
    try:
        model = _load_vision(settings, info) if info.vision else _load_text(settings, info)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, AttributeError) as error:
        raise ModelLoadError(f"{info.folder}: {_describe_error(error)}") from error
    dtype = _choose_dtype(settings)
    if dtype is not None:
        model.set_dtype(dtype)
    model.eval()
    form = settle_weights(model, config, dtype or _find_dtype(model))
    evaluate_parameters(model, info.name)
    attention.route_attention(model)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    if not info.vision:
        return Adapter(model, form)
    # Features of images are reused bit by bit only where all images of a prompt are the same.
    line_break = getattr(info.processor, "image_break_token_id", None)
    return VisionAdapter(model, config.cache.image_bytes, config.engine.reproducible, line_break, form)


def _find_dtype(model: Any) -> mx.Dtype:
    """The type of activations: that of most floating-point parameters of the language model, without those of
    LoRA adapters, which are in float32 whatever the model's type is."""
    parameters = tree_flatten(getattr(model, "language_model", model).parameters())
    dtypes = [array.dtype for name, array in parameters if ".lora_" not in name]
    found = Counter(dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating))
    return found.most_common(1)[0][0] if found else mx.bfloat16


def _load_text(settings: ModelSettings, info: LoadedModelInfo) -> Any:
    from mlx_lm.utils import load_adapters, load_model

    strict = "vision_config" not in info.config  # of a vision model only the text part is loaded
    model, _ = load_model(info.folder, lazy=True, strict=strict, trust_remote_code=settings.trust_remote_code)
    if not strict:
        _check_complete(model, info.folder)
    return load_adapters(model, settings.adapter) if settings.adapter else model


def _check_complete(model: Any, folder: Path) -> None:
    """ModelLoadError if weights are missing: loaded without `strict`, they would stay random."""
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    missing = dict(tree_flatten(model.parameters())).keys() - model.sanitize(weights).keys()
    if missing:
        raise ModelLoadError(f"{folder}: {len(missing)} parameters are missing, such as {min(missing)}")


def _load_vision(settings: ModelSettings, info: LoadedModelInfo) -> Any:
    from mlx_vlm.utils import load_model

    if "model_file" in info.config and not settings.trust_remote_code:  # mlx-vlm would run it
        raise ModelLoadError(
            f"{info.folder}: config.json names Python code of its own (model_file): read it, and set "
            "model.trust_remote_code to run it"
        )
    model = load_model(info.folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    return _apply_lora(model, settings.adapter) if settings.adapter else model


def _apply_lora(model: Any, adapter: str) -> Any:
    """The vision model with its LoRA adapter. The library loads any tensors, and prints what it did."""
    from mlx_vlm.utils import apply_lora_layers

    load_weights = model.load_weights

    def checked(file: str, strict: bool) -> None:
        load_weights(_read_fitting_weights(model, file), strict=strict)

    model.load_weights = checked
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            apply_lora_layers(model, adapter)
    finally:
        del model.load_weights
    for line in output.getvalue().splitlines():
        log.info("%s: %s", adapter, line)
    return model


def _read_fitting_weights(model: Any, file: str) -> list[tuple[str, mx.array]]:
    """The file's tensors; ModelLoadError unless each fits a parameter and no LoRA parameter is missing."""
    tensors, parameters = mx.load(file), dict(tree_flatten(model.parameters()))
    wrong = [
        f"{name}: the model has no such parameter"
        if name not in parameters
        else f"{name}: of shape {tensor.shape}, where the model has {parameters[name].shape}"
        for name, tensor in sorted(tensors.items())
        if name not in parameters or tensor.shape != parameters[name].shape
    ]
    missing = dict(tree_flatten(model.trainable_parameters())).keys() - tensors.keys()
    wrong += [f"{name}: missing in the file" for name in sorted(missing)]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ModelLoadError(f"{file}: the adapter does not fit the model: {'; '.join(wrong[:3])}{more}")
    return list(tensors.items())


def _choose_dtype(settings: ModelSettings) -> mx.Dtype | None:
    """The dtype to cast to; None keeps the file's. Half precision is several times slower on a CPU."""
    if settings.dtype == "auto":
        return mx.float32 if mx.default_device() == mx.cpu else None
    return {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[settings.dtype]


def _describe_error(error: Exception) -> str:
    """The error, with the library versions if they do not know the model type."""
    text = f"the model cannot be loaded: {type(error).__name__}: {error}"
    if "not supported" in str(error):
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("mlx-lm", "mlx-vlm"))
        text += f" (by {versions})"
    return text
