"""A LoRA adapter (`model.adapter`): applied, part of what the prefix cache is rooted in, and refused where it
does not fit: an option that changes nothing would be a lie.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.core.request import HitKind
from mlxrun.model.load import loader
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.machine import device
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.oracle import text_answer
from tests.helpers.pooling_models import build_pooling_model
from tests.helpers.whisper_models import write_whisper

pytestmark = pytest.mark.thorough

BASE = tuple(text_models.prompts(41, [40])[0])
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


def test_an_adapter_is_applied(zoo: Zoo, adapter: Make) -> None:
    """The answers are those of mlx-lm with the same adapter, and not the plain model's."""
    folder, made = zoo.text("llama"), adapter()
    event = engine_driver.run_requests(
        engine_driver.make_real_engine(folder, adapter=str(made)),
        [engine_driver.make_text_request("a", BASE)],
    )["a"]
    engine_driver.check_answer(event, text_answer(folder, BASE, adapter=str(made)))
    assert engine_driver.has_other_answer(event, zoo.answer("llama", BASE))


def test_weights_are_cast_alike_on_several_streams(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(device, "PARALLEL_BYTES", least)
        engine = engine_driver.make_real_engine(zoo.text("llama"), dtype="bfloat16", load_check=False)
        found.append(dict(tree_flatten(engine_driver.get_runner(engine)._caller.model.parameters())))
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        assert array.dtype == mx.bfloat16 and mx.array_equal(array, found[1][name]).item()


def test_adapters_do_not_decide_the_type_of_activations(zoo: Zoo) -> None:
    """Most floating-point parameters are the adapter's here: of the model, only norms have such ones."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(zoo.text("llama"), lazy=True)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
    linear_to_lora_layers(model, 2, LORA)
    dtypes = [array.dtype for _, array in tree_flatten(model.parameters())]
    assert dtypes.count(mx.float32) > dtypes.count(mx.bfloat16) > 0
    assert loader.find_dtype(model) == mx.bfloat16


def test_prefixes_of_other_weights_are_not_used(zoo: Zoo, adapter: Make, tmp_path: Path) -> None:
    """One folder of the cache; the plain model and each adapter find their own records and no others."""
    folder, disk = zoo.text("llama"), str(tmp_path / "cache")
    ways: list[dict[str, str]] = [{}, *({"adapter": str(adapter(f"{seed}", seed))} for seed in (1, 2))]
    found = []
    for _ in range(2):
        for way in ways:
            engine = engine_driver.make_real_engine(folder, backend="disk", disk_path=disk, **way)
            event = engine_driver.run_requests(engine, [engine_driver.make_text_request("a", BASE)])["a"]
            engine.prefix_cache.shutdown()
            found.append((event.num_cached_tokens, event.tokens))
            assert (event.hit_kind is HitKind.MISS) == (len(found) <= len(ways))
    assert found[:3] == [(0, tokens) for _, tokens in found[3:]]
    assert len({tokens for _, tokens in found}) == 3


def test_an_adapter_that_does_not_fit_is_refused(zoo: Zoo, adapter: Make, tmp_path: Path) -> None:
    """Never the plain model's answers in its name."""
    bad = {
        "other names": (adapter("names", prefix="base_model."), "base_model.*no such parameter"),
        "other shapes": (adapter("shapes", shape=(3, 3)), r"of shape \(3, 3\), where the model has"),
        "nothing there": (tmp_path / "missing", "missing has no adapter_config.json"),
        "no config": (tmp_path, "adapter_config.json"),
    }
    for folder, said in bad.values():
        with pytest.raises(ConfigError, match=f"(?s)^model.adapter: {tmp_path}.*{said}"):
            engine_driver.make_real_engine(zoo.text("llama"), adapter=str(folder))
    del bad["nothing there"], bad["no config"]
    for name, edit, said in (
        ("PEFT", {"peft_type": "LORA"}, "is an adapter of PEFT, which mlx-lm does not read"),
        ("full", {"fine_tune_type": "full"}, "it replaces all weights; set model.adapter"),
        ("deeper", {"num_layers": 3}, r"layers\.0\..*lora_a: missing in the file.* more"),
    ):
        folder = adapter(name)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | edit))
        bad[name] = folder, said
    for name in ("no config", "no weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "no weights" / "adapter_config.json").write_text("{}")
    bad["no config"] = (
        tmp_path / "no config",
        "has no adapter_config.json, so it is not the folder of an adapter",
    )
    bad["no weights"] = tmp_path / "no weights", "has no adapters.safetensors"
    for name, file, size in (("empty", "adapters.safetensors", 0), ("cut", "adapters.safetensors", 999)):
        folder = adapter(name)
        (folder / file).write_bytes((folder / file).read_bytes()[:size])
        bad[name] = folder, f"{name}/{file}: the header of the weights cannot be used"
    (adapter("torn") / "adapter_config.json").write_text('{"num_layers": ')
    bad["torn"] = tmp_path / "torn", "torn/adapter_config.json: Expecting value"
    for name, (folder, said) in bad.items():
        with pytest.raises(ConfigError, match=f"(?s)model.adapters: {name}: .*{said}"):
            engine_driver.make_real_engine(zoo.text("llama"), adapters={name: str(folder)})


@pytest.mark.parametrize("setting", ["adapter", "adapters"])
@pytest.mark.parametrize("kind", ["bert", "bert-reranker", "whisper"])
def test_a_model_that_is_computed_without_adapters_refuses_them(
    tmp_path: Path, adapter: Make, kind: str, setting: str
) -> None:
    """Its vectors or transcripts would be the plain model's."""
    folder, path = tmp_path / kind, str(adapter())
    if kind == "whisper":
        write_whisper(folder)
    else:
        build_pooling_model(kind, folder)
    settings = ModelSettings(str(folder), **{setting: path if setting == "adapter" else {"one": path}})
    with pytest.raises(ConfigError, match=f"model.{setting}: encoders and models that transcribe"):
        load_model_info(settings)


# -- models that see --------------------------------------------------------------------------------------

LEGACY = {"rank": 4, "alpha": 8.0, "dropout": 0.0}  # of mlx-vlm's older training
Tensors = dict[str, mx.array]


@pytest.fixture
def seeing(zoo: Zoo, tmp_path: Path) -> Make:
    """Writes random adapters for a tiny vision model, as mlx-vlm saves them; `edit` changes the tensors."""

    def make(
        name: str,
        edit: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        legacy: bool = False,
        layers: Sequence[str] = ("q_proj", "v_proj"),
    ) -> Path:
        from mlx_vlm.trainer.peft.utils import get_peft_model
        from mlx_vlm.utils import load_model

        model = load_model(zoo.vision("qwen3_vl"))
        scale = {"rank": 4, "alpha": 8.0, "dropout": 0.0}
        adapted = None if legacy else list(layers)  # the older kind has all of them
        get_peft_model(model, adapted, verbose=False, legacy=legacy, **scale)
        mx.random.seed(1)
        tensors = {
            key: mx.random.normal(value.shape) * 0.1
            for key, value in tree_flatten(model.trainable_parameters())
        }
        keys = sorted({key.rpartition(".")[0] for key in tensors})
        lora = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "adapters.safetensors"), edit(tensors))
        config = LEGACY if legacy else {"fine_tune_type": "lora", "lora_parameters": lora}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return make


def test_another_rank_in_the_config_is_named(zoo: Zoo, adapter: Make) -> None:
    """In place of all tensors, which mlx-lm lists."""
    made = adapter("bad")
    file = made / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_parameters": LORA | {"rank": 16}}))
    reason = r"rank is 16 in adapter_config\.json, the tensors have 4, such as \S+ of shape \(\d+, 4\)$"
    with pytest.raises(ConfigError, match=rf"bad: the adapter does not fit the model: {reason}"):
        engine_driver.make_real_engine(zoo.text("llama"), adapters={"bad": str(made)})


def test_a_vision_adapter_is_applied(zoo: Zoo, seeing: Make) -> None:
    """The answers are those of mlx-vlm with the same adapter, and not the plain model's."""
    from mlx_vlm.utils import apply_lora_layers, load_model

    folder, made = zoo.vision("qwen3_vl"), seeing("good")
    alone = engine_driver.make_real_engine(folder, adapter=str(made))
    chosen = engine_driver.make_real_engine(folder, adapters={"good": str(made)})
    model = apply_lora_layers(load_model(folder), made)
    ids = vision_models.prompt("qwen3_vl", "what is this?")
    plain = engine_driver.make_vision_request(chosen, "plain", ids, max_tokens=6)
    adapted = replace(plain, id="adapted", adapter=chosen.model_info.adapters[0])
    together = engine_driver.run_requests(chosen, [plain, adapted])
    event = engine_driver.run_requests(alone, [plain])["plain"]
    assert together["adapted"].tokens == event.tokens != together["plain"].tokens
    tokens = list(alone.model_info.tokenizer.encode(ids))
    for token in event.tokens:
        logits = model.language_model(mx.array([tokens])).logits
        assert int(mx.argmax(logits[0, -1])) == token
        tokens.append(token)


def test_several_adapters_of_a_tower_are_refused(zoo: Zoo, seeing: Make) -> None:
    """Images are computed once for all rows."""
    made = seeing("tower", layers=["vision_tower.blocks.0.attn.qkv"])
    engine_driver.make_real_engine(zoo.vision("qwen3_vl"), adapter=str(made), load_check=False)
    with pytest.raises(ConfigError, match="model.adapters: tower: .*it adapts vision_tower.*for images too"):
        engine_driver.make_real_engine(zoo.vision("qwen3_vl"), adapters={"tower": str(made)})


def foreign(tensors: Tensors) -> Tensors:
    return {f"base_model.{name}": tensor for name, tensor in tensors.items()}


def one_foreign(tensors: Tensors) -> Tensors:
    return tensors | {"language_model.model.layers.7.x.lora_a": mx.ones((2, 2))}


def other_shapes(tensors: Tensors) -> Tensors:
    return {name: mx.ones((3, 3)) for name in tensors}


def whole_numbers(tensors: Tensors) -> Tensors:
    return {name: tensor.astype(mx.int32) for name, tensor in tensors.items()}


def halved(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("lora_b")}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (foreign, r"base_model\..*: the model has no such parameter; .* more"),
        (one_foreign, r"layers\.7\.x\.lora_a: the model has no such parameter"),
        (other_shapes, r"of shape \(3, 3\), where the model has"),
        (whole_numbers, r"int32 of shape .*, where the model has .*float32"),
        (halved, r"lora_b: missing in the file"),
    ],
)
def test_a_vision_adapter_that_does_not_fit_is_refused(
    zoo: Zoo, seeing: Make, edit: Callable[[Tensors], Tensors], said: str
) -> None:
    """Never the plain model's answers in its name, nor random ones: the file and the tensors are named."""
    with pytest.raises(ConfigError, match=rf"bad: the adapter does not fit.*{said}"):
        engine_driver.make_real_engine(zoo.vision("qwen3_vl"), adapter=str(seeing("bad", edit)))


def test_what_the_library_prints_goes_to_the_log(
    zoo: Zoo, seeing: Make, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Standard output is for answers. An adapter of mlx-vlm's older kind is loaded as well."""
    made = seeing("old", legacy=True)
    capsys.readouterr()
    with caplog.at_level(logging.INFO, "mlxrun.model.lora"):
        engine_driver.make_real_engine(zoo.vision("qwen3_vl"), adapter=str(made))
    assert "trainable params" in caplog.text
    assert capsys.readouterr().out == ""


def test_media_that_needs_a_custom_module_is_not_run_unasked(zoo: Zoo, tmp_path: Path) -> None:
    """mlx-vlm imports `model_file` of a config without asking: mlxrun asks model.trust_remote_code."""
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(zoo.vision("qwen3_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        engine_driver.make_real_engine(folder)
    assert not (tmp_path / "ran").exists()
