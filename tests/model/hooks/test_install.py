"""All hooks are installed in one place, in their order, and those that change a model are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.model.hooks.install import InstalledHook, needs_quick_gates
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo


def load_hooks(folder: Path) -> dict[str, InstalledHook]:
    config = Config(model=ModelSettings(path=str(folder)))
    hooks = load_caller(config, load_model_info(config.model, weights=True)).hooks
    return {hook.name: hook for hook in hooks}


@pytest.mark.parametrize(
    ("family", "seam"), [("llama", "attention"), ("gemma2", "soft caps"), ("qwen3_next", "attention")]
)
def test_the_hooks_of_a_family(zoo: Zoo, family: str, seam: str) -> None:
    """In their order; the second time too, when the library's functions are changed already."""
    for _ in range(2):
        hooks = load_hooks(zoo.text(family))
        gates = ["gates"] if needs_quick_gates() and family != "gemma2" else []
        assert list(hooks) == ["linear layers", "rotary positions", seam, "drafts", *gates]
        assert hooks["linear layers"].places > 5 and hooks[seam].places >= 1
