"""Heads as checkpoints have them, compared with the same layers computed here, and with mlx-vlm's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from benchmarks.tiny.random_models import write_text_model
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_files import read_json
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.speculation.mtp_head import FoundHead, MTPHead, find_mtp_head, load_mtp_head
from tests.helpers import mtp_models

TOKENS = 5
WIDTH = 64
UNNORMED = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "ernie4_5_moe")  # what further predictions start from
EPS = {"qwen3_next": 1e-5, "qwen3_5": 1e-6}  # as the tiny models have it


def write_model(family: str, folder: Path) -> dict[str, mx.array]:
    """A tiny model with a head; returns the head's weights."""
    write_text_model(family, folder)
    head = mtp_models.draw_head(family, folder)
    mtp_models.save_head(family, folder, head)
    return head


def load(folder: Path) -> MTPHead:
    info = load_model_info(ModelSettings(path=str(folder)))
    found = find_mtp_head(info)
    assert not isinstance(found, str), found
    return load_mtp_head(info, found, mx.float32)


def explain(folder: Path) -> object:
    return find_mtp_head(load_model_info(ModelSettings(path=str(folder))))


def make_pairs() -> tuple[mx.array, mx.array]:
    key = mx.random.key(1)
    return tuple(mx.random.normal((2, TOKENS, WIDTH), key=k) for k in mx.random.split(key))


def compute(head: MTPHead) -> list[mx.array]:
    embeds, hidden = make_pairs()
    mask = nn.MultiHeadAttention.create_additive_causal_mask(TOKENS) == 0
    return list(head(embeds, hidden, mask, None))


def compute_here(family: str, folder: Path, weights: dict[str, mx.array]) -> list[mx.array]:
    """What the head's output must be, and that from which the next prediction starts."""
    config = read_json(folder / "config.json")
    layer = mtp_models.make_layer(family, config)
    eps = layer.layers[0].norm.eps if family == "nemotron_h" else layer.input_layernorm.eps
    layer.load_weights([(n[6:], a) for n, a in weights.items() if n.startswith("layer.")])
    embeds, hidden = make_pairs()
    halves = [
        mx.fast.rms_norm(x, weights[f"{name}.weight"], eps)
        for x, name in ((embeds, "embed_norm"), (hidden, "hidden_norm"))
    ]
    if family == "mimo":
        halves.reverse()
    mask = nn.MultiHeadAttention.create_additive_causal_mask(TOKENS) == 0
    output = layer(mx.concatenate(halves, axis=-1) @ weights["project.weight"].T, mask, None)
    normed = output
    if "norm.weight" in weights:
        normed = mx.fast.rms_norm(output, weights["norm.weight"], eps)
    chained = normed if family not in UNNORMED else output
    return [normed, chained]


@pytest.mark.parametrize("family", list(mtp_models.NAMES))
def test_a_head_computes_what_its_weights_say(tmp_path: Path, family: str) -> None:
    weights = write_model(family, tmp_path)
    for found, wanted in zip(compute(load(tmp_path)), compute_here(family, tmp_path, weights), strict=True):
        assert mx.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_head_is_that_of_mlx_vlm(tmp_path: Path, family: str) -> None:
    """The library's splitter reads the same file; its module has positions that it is given."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    write_model(family, tmp_path)
    config = read_json(tmp_path / "config.json")
    text = config.get("text_config", config)
    text |= {"model_type": family, "rms_norm_eps": EPS[family]}  # where the library has no default
    text.get("rope_parameters", {}).setdefault("mrope_section", [2, 1, 1])
    library: Any = get_mtp_splitter(source_config=config).load(tmp_path, source_config=config)
    embeds, hidden = make_pairs()
    wanted = library._forward_hidden(embeds, hidden, None, mx.arange(TOKENS)[None])
    assert mx.allclose(compute(load(tmp_path))[0], wanted, atol=1e-5)


def test_a_head_of_two_layers_is_that_of_mlx_vlm(tmp_path: Path) -> None:
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    write_model("nemotron_h", tmp_path)
    config = read_json(tmp_path / "config.json")
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    library: Any = get_mtp_splitter(source_config=config).load(tmp_path, source_config=config)
    embeds, hidden = make_pairs()
    wanted, _ = library._forward_hidden(embeds, hidden, None, library.make_cache())
    assert mx.allclose(compute(load(tmp_path))[0], wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [None, (3,)])
def test_a_head_without_an_expert_is_refused(tmp_path: Path, shape: tuple[int, ...] | None) -> None:
    """By the error that `speculation.method: auto` goes on after."""
    write_model("qwen3_next", tmp_path)
    file = str(tmp_path / "model-mtp.safetensors")
    weights, metadata = mx.load(file, return_metadata=True)
    name = next(name for name in weights if "experts.2." in name)
    changed = {n: array[...] for n, array in weights.items() if n != name}
    changed |= {} if shape is None else {name: mx.zeros(shape)}
    mx.eval(changed)
    mx.save_safetensors(file, changed, metadata=metadata)
    with pytest.raises(ModelLoadError, match=f"^{tmp_path}: the model cannot be loaded: "):
        load(tmp_path)


def test_a_file_that_was_cut_has_no_head(tmp_path: Path) -> None:
    write_model("qwen3_next", tmp_path)
    info = load_model_info(ModelSettings(path=str(tmp_path)))
    file = tmp_path / "model-mtp.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ModelLoadError, match=r"model-mtp\.safetensors"):
        find_mtp_head(info)


def test_a_head_that_mlx_vlm_split_off_is_the_same(tmp_path: Path) -> None:
    """The checkpoint beside it has none. Other families have other names there."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    write_model("qwen3_next", tmp_path / "model")
    wanted = compute(load(tmp_path / "model"))[0]
    config = read_json(tmp_path / "model" / "config.json")
    get_mtp_splitter(source_config=config).split(str(tmp_path / "model"), str(tmp_path / "head"))
    (tmp_path / "model" / "model-mtp.safetensors").unlink()
    info = load_model_info(ModelSettings(path=str(tmp_path / "model")))
    found = find_mtp_head(info, tmp_path / "head")
    assert isinstance(found, FoundHead)
    assert mx.allclose(compute(load_mtp_head(info, found, mx.float32))[0], wanted, atol=1e-5)
    write_text_model("glm4_moe", tmp_path / "other")
    other = load_model_info(ModelSettings(path=str(tmp_path / "other")))
    assert "are read from its checkpoint only" in str(find_mtp_head(other, tmp_path / "head"))


def test_a_quantized_head_is_loaded_as_it_is_stored(tmp_path: Path) -> None:
    """With bits of its own for one layer; the rest is as in the plain file."""
    weights = write_model("glm4_moe", tmp_path)
    for name, bits in (("project", 8), ("layer.mlp.shared_experts.up_proj", 4)):
        packed = mx.quantize(weights[f"{name}.weight"], group_size=32, bits=bits)
        made = dict(zip(("weight", "scales", "biases"), packed, strict=True))
        weights |= {f"{name}.{kind}": array for kind, array in made.items()}
    plain = compute(load(tmp_path))
    mtp_models.save_head("glm4_moe", tmp_path, weights)
    head: Any = load(tmp_path)
    assert (head.project.bits, head.layer.mlp.shared_experts.up_proj.bits) == (8, 4)
    assert head.project.group_size == 32
    found = compute(head)
    assert not mx.allclose(found[0], plain[0], atol=1e-5)
    assert mx.mean(mx.abs(found[0] - plain[0])).item() < 0.2


def test_without_a_head_the_reason_is_given(tmp_path: Path) -> None:
    write_text_model("glm4_moe", tmp_path / "plain")
    assert explain(tmp_path / "plain") == "the checkpoint has no weights of MTP heads (model.layers.N.*)"
    write_text_model("llama", tmp_path / "other")
    assert explain(tmp_path / "other") == "no format of MTP heads is known for model type llama"


def test_missing_weights_are_named(tmp_path: Path) -> None:
    weights = write_model("glm4_moe", tmp_path)
    del weights["layer.self_attn.k_proj.weight"]
    mtp_models.save_head("glm4_moe", tmp_path, weights)
    with pytest.raises(ModelLoadError, match=r"missing weights: layer\.self_attn\.k_proj\.weight"):
        load(tmp_path)
