"""Models to measure: random weights in a named shape, written as a model folder, or any local folder.

Both sides of a comparison load the same files. Random weights cost the same time as trained ones; the tiny
preset is scaled so that its greedy answers vary, which lets the two sides' tokens be compared.
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

from mlxrun.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "eos_token_id": 1,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3
    | {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}

PLAIN, WINDOWED, HYBRID, VISION = "plain", "windowed", "hybrid", "vision"
_TINY = PRESETS["tiny"]
# The tiny preset in other architectures: windows beside full attention, recurrent layers beside it.
_FAMILIES: dict[str, dict[str, Any]] = {
    WINDOWED: _TINY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 256,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
    },
    HYBRID: _TINY
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
}


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model folder and what the benchmark needs to know of it. `dtype` None: quantised or unnamed."""

    name: str
    folder: Path
    vocab: int
    dtype: str | None


def families(name: str) -> tuple[str, ...]:
    """The families of that preset, or the one of a local folder (`embedded`: the built-in model)."""
    if name == "tiny":
        return (PLAIN, *_FAMILIES, VISION)
    if name in PRESETS:
        return (PLAIN,)
    return (_family(_read_config(_folder(name))),)


def _family(config: Mapping[str, Any]) -> str:
    if "vision_config" in config:
        return VISION
    kinds = " ".join(config.get("layer_types") or ())
    if "linear" in kinds or "mamba" in kinds or any(key.startswith(("linear_", "mamba_")) for key in config):
        return HYBRID
    if "sliding" in kinds or (config.get("sliding_window") and config.get("use_sliding_window", True)):
        return WINDOWED
    return PLAIN


@contextlib.contextmanager
def bench_model(name: str, seed: int = 0, family: str | None = None) -> Iterator[BenchModel]:
    """The folder of a preset, written for the time of the block, or the local folder of that path.

    `family`: the tiny preset in that one; its vision model is the embedded one.
    """
    if name in PRESETS and family != VISION:
        with tempfile.TemporaryDirectory(prefix="mlxrun-bench-") as folder:
            write_model(Path(folder), _FAMILIES.get(family or PLAIN, PRESETS[name]), seed)
            yield describe(name, Path(folder))
    else:
        folder_of = _folder("embedded" if name in PRESETS else name)
        yield describe("embedded" if name in PRESETS else folder_of.resolve().name, folder_of)


def _folder(name: str) -> Path:
    if name == "embedded":
        from mlxrun.config.settings import ModelSettings
        from mlxrun.model.model_files import find_model_folder

        return find_model_folder(ModelSettings())
    if (Path(name) / "config.json").is_file():
        return Path(name)
    raise ConfigError(
        f"--model {name}: neither a preset ({', '.join(PRESETS)}) nor a local folder with a config.json"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def describe(name: str, folder: Path) -> BenchModel:
    """Read what config.json says; multimodal models keep it in `text_config`."""
    config = _read_config(folder)
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


def write_chat_model(folder: Path, name: str, seed: int = 0) -> None:
    """A preset with the built-in model's tokenizer and chat template, which every server loads. Its greedy
    answers never end by themselves: the rows of control tokens in the output layer are zero."""
    source = _folder("embedded")
    tokens = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: int(token["id"]) for token in tokens["added_tokens"]}
    size = max([*tokens["model"]["vocab"].values(), *added.values()]) + 1
    eos = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    config = PRESETS[name] | {
        "vocab_size": size,
        "eos_token_id": added[eos],
        "tie_word_embeddings": False,
    }
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
    """`silent`: tokens that greedy answers never have."""
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
        weights[path] = _random(config["model_type"], path, value.shape, next(keys)).astype(dtype)
        if path.startswith("lm_head") and silent:
            weights[path][mx.array(silent)] = 0
        mx.eval(weights[path])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _random(kind: str, path: str, shape: tuple[int, ...], key: Any) -> Any:
    """Norms are ones. Matrices keep their input's size, a little more in the middle so that depth matters."""
    import mlx.core as mx

    if path.endswith("A_log"):  # slow decay: else a recurrent state forgets within a few tokens
        return mx.log(mx.random.uniform(0.002, 0.05, shape, key=key))
    if len(shape) == 1:
        return mx.ones(shape)
    fan = math.prod(shape[1:]) if "conv" in path else shape[-1]
    # gemma3 multiplies its embeddings by the square root of their width itself.
    gain = {"embed_tokens": 1.0 if kind == "gemma3_text" else shape[-1] ** 0.5, "lm_head": 2.0}
    scale = next((g for part, g in gain.items() if part in path), 1.6) / fan**0.5
    return mx.random.normal(shape, key=key) * scale
