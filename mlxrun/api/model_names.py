"""The names that `model` of a body may have: those of the model, and those of its LoRA adapters."""

from __future__ import annotations

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import quote
from mlxrun.core.request import LoraAdapter


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
