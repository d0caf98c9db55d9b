"""Models for benchmarks: presets with random weights, written as a model folder, or any local folder.

Both sides of a comparison load the same files. Random weights take the same time as trained ones. They are
scaled so that greedy answers vary and the tokens of the two sides can be compared.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def _describe_qwen3(
    *,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    inner: int,
    vocab: int = 151936,
    tied: bool = False,
    dtype: str = "bfloat16",
    **more: Any,
) -> dict[str, Any]:
    """The config.json of a model of this shape. `heads`: of queries, of keys; `inner`: width of the MLP."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "eos_token_id": 1,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "dtype": dtype,
    } | more


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _describe_qwen3(
        hidden=128, layers=4, heads=(4, 2), head_dim=32, inner=384, vocab=1024, dtype="float32"
    ),
    "qwen3-0.6b": _describe_qwen3(hidden=1024, layers=28, heads=(16, 8), head_dim=128, inner=3072, tied=True),
    "qwen3-8b": _describe_qwen3(hidden=4096, layers=36, heads=(32, 8), head_dim=128, inner=12288),
    "qwen3-30b-a3b": _describe_qwen3(
        hidden=2048,
        layers=12,  # of 48: time a layer is what is compared
        heads=(32, 4),
        head_dim=128,
        inner=6144,
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
}
PRESETS |= {
    f"{name}-{bits}bit": preset | {"quantization": {"group_size": 64, "bits": bits}}
    for name, preset in PRESETS.items()
    for bits in (4, 8)
}


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model folder with its vocabulary and dtype (None: quantized, or not in config.json)."""

    name: str
    folder: Path
    vocab: int
    dtype: str | None


@contextlib.contextmanager
def open_model(name: str, seed: int = 0, config: Mapping[str, Any] | None = None) -> Iterator[BenchModel]:
    """Open a preset (or `config` under its name), written to a temporary folder, or the local folder of that
    name. ConfigError if there is none."""
    if name in PRESETS:
        with tempfile.TemporaryDirectory(prefix="mlxrun-bench-") as folder:
            write_model(Path(folder), config or PRESETS[name], seed)
            yield describe_model(name, Path(folder))
    else:
        local = find_folder(name)
        yield describe_model(name if name == "embedded" else local.resolve().name, local)


def find_folder(name: str) -> Path:
    if name == "embedded":
        from mlxrun.config.settings import ModelSettings
        from mlxrun.model.load.model_files import find_model_folder

        return find_model_folder(ModelSettings())
    if (Path(name) / "config.json").is_file():
        return Path(name)
    raise ConfigError(
        f"--model {name}: neither embedded nor a preset ({', '.join(PRESETS)}) nor a local folder with a "
        "config.json"
    )


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def describe_model(name: str, folder: Path) -> BenchModel:
    """Read config.json; multimodal models have `text_config` in it. ConfigError without a `vocab_size`."""
    config = read_config(folder)
    text = config.get("text_config", {}) | config
    if "vocab_size" not in text:
        raise ConfigError(f"--model {folder}: config.json has no vocab_size")
    dtype = text.get("dtype", text.get("torch_dtype"))
    plain = dtype in DTYPES and "quantization" not in config
    return BenchModel(name, folder, int(text["vocab_size"]), dtype if plain else None)


def write_model(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write config, random weights and a tokenizer with one word a token id."""
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _write_tokenizer(folder, config["vocab_size"])
    _write_weights(folder, config, seed)


def write_chat_model(folder: Path, preset: Mapping[str, Any], seed: int = 0) -> None:
    """Write a preset with the built-in model's tokenizer and chat template, which every server can load. Its
    greedy answers never end by themselves: the rows of control tokens in the output layer are zero."""
    source = find_folder("embedded")
    tokens = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: int(token["id"]) for token in tokens["added_tokens"]}
    size = max([*tokens["model"]["vocab"].values(), *added.values()]) + 1
    eos = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    own = {"vocab_size": size, "eos_token_id": added[eos], "tie_word_embeddings": False}
    config = {**preset, **own}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / file, folder / file)
    _write_weights(folder, config, seed, silent=tuple(added.values()))


def _write_tokenizer(folder: Path, vocab: int) -> None:
    model = {"type": "WordLevel", "vocab": {f"<{i}>": i for i in range(vocab)}, "unk_token": "<0>"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<0>", "eos_token": "<1>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _write_weights(folder: Path, config: Mapping[str, Any], seed: int, silent: Sequence[int] = ()) -> None:
    """Write random weights. `silent`: tokens that greedy answers never contain."""
    import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx

    # isort: split
    import mlx.core as mx
    from mlx.utils import tree_flatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[config["dtype"]]
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))
    weights = {}
    for path, value in tree_flatten(model.parameters()):
        weights[path] = _draw_weights(config["model_type"], path, value.shape, next(keys)).astype(dtype)
        if path.startswith("lm_head") and silent:
            weights[path][mx.array(silent)] = 0
        if "quantization" in config:
            weights |= _quantize(path, weights.pop(path), config["quantization"])
        mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _quantize(path: str, weight: Any, options: Mapping[str, int]) -> dict[str, Any]:
    """A weight as mlx-lm's quantized checkpoints have it: matrices in groups, the rest as it is."""
    import mlx.core as mx

    quantized = path.endswith(".weight") and weight.ndim > 1 and weight.shape[-1] % options["group_size"] == 0
    if not quantized or path.endswith("mlp.gate.weight"):  # routers stay exact
        return {path: weight}
    names = (path, path.removesuffix("weight") + "scales", path.removesuffix("weight") + "biases")
    return dict(zip(names, mx.quantize(weight, **options), strict=True))


def _draw_weights(kind: str, path: str, shape: tuple[int, ...], key: Any) -> Any:
    """Norms are ones. Matrices preserve the norm of their input, inner ones increase it so that depth
    matters."""
    import mlx.core as mx

    if path.endswith("A_log"):  # slow decay, or a recurrent state would fade within a few tokens
        return mx.log(mx.random.uniform(0.002, 0.05, shape, key=key))
    if len(shape) == 1:
        return mx.ones(shape)
    fan = math.prod(shape[1:]) if "conv" in path else shape[-1]
    # gemma3 multiplies its embeddings by the square root of their width itself.
    gain = {"embed_tokens": 1.0 if kind == "gemma3_text" else shape[-1] ** 0.5, "lm_head": 2.0}
    scale = next((g for part, g in gain.items() if part in path), 1.6) / fan**0.5
    return mx.random.normal(shape, key=key) * scale
