"""A LoRA adapter (`model.adapter`): applied, part of what the prefix cache is rooted in, and refused where it
does not fit. B28, A66: an option that changes nothing would be a lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import drive
import mlx.core as mx
import models
import pytest
from fixtures_models import Zoo
from mlx.utils import tree_flatten
from oracle import Answer, text_answer

from mlxrun.errors import ModelLoadError
from mlxrun.scheduler.request import HitKind

BASE = tuple(models.prompts(41, [40])[0])
LORA = {"rank": 4, "scale": 8.0, "dropout": 0.0}

Make = Callable[..., Path]


@pytest.fixture
def adapter(zoo: Zoo, tmp_path: Path) -> Make:
    """Writes random adapters for the tiny llama, as mlx-lm's own training would save them."""

    def make(name: str = "adapter", seed: int = 1, prefix: str = "", shape: tuple[int, ...] = ()) -> Path:
        from mlx_lm import load
        from mlx_lm.tuner.utils import linear_to_lora_layers

        model, _ = load(str(zoo.text("llama")))
        model.freeze()
        linear_to_lora_layers(model, 2, LORA)
        mx.random.seed(seed)
        weights = {
            prefix + name: mx.random.normal(shape or value.shape) * 0.1
            for name, value in tree_flatten(model.trainable_parameters())
        }
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
        config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return make


def library(folder: Path, adapter: Path) -> Answer:
    """What mlx-lm answers with it."""
    import mlx_lm

    with pytest.MonkeyPatch.context() as patch:
        real = mlx_lm.load
        patch.setattr(mlx_lm, "load", lambda path: real(path, adapter_path=str(adapter)))
        return text_answer(folder, BASE)


def test_an_adapter_is_applied(zoo: Zoo, adapter: Make) -> None:
    """The answers are those of mlx-lm with the same adapter, and not the plain model's."""
    folder, made = zoo.text("llama"), adapter()
    event = drive.run(drive.engine(folder, adapter=str(made)), [drive.text("a", BASE)])["a"]
    drive.same(event, library(folder, made))
    assert drive.differs(event, zoo.answer("llama", BASE))


def test_prefixes_of_other_weights_are_not_used(zoo: Zoo, adapter: Make, tmp_path: Path) -> None:
    """B28: one folder of the cache; the plain model and each adapter find their own records and no others."""
    folder, disk = zoo.text("llama"), str(tmp_path / "cache")
    ways: list[dict[str, str]] = [{}, *({"adapter": str(adapter(f"{seed}", seed))} for seed in (1, 2))]
    found = []
    for _ in range(2):
        for way in ways:
            engine = drive.engine(folder, backend="disk", disk_path=disk, **way)
            event = drive.run(engine, [drive.text("a", BASE)])["a"]
            engine.prefixes.shutdown()
            found.append((event.cached, event.tokens))
            assert (event.hit is HitKind.MISS) == (len(found) <= len(ways))
    assert found[:3] == [(0, tokens) for _, tokens in found[3:]]
    assert len({tokens for _, tokens in found}) == 3


def test_an_adapter_that_does_not_fit_is_refused(zoo: Zoo, adapter: Make, tmp_path: Path) -> None:
    """Never the plain model's answers in its name."""
    bad = {
        "other names": (adapter("names", prefix="base_model."), "base_model.*not an adapter parameter"),
        "other shapes": (adapter("shapes", shape=(3, 3)), "does not match model parameter shape"),
        "nothing there": (tmp_path / "missing", "does not exist.*missing"),
        "no config": (tmp_path, "adapter_config.json"),
    }
    for folder, said in bad.values():
        with pytest.raises(ModelLoadError, match=f"(?s){said}"):
            drive.engine(zoo.text("llama"), adapter=str(folder))
