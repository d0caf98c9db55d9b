"""Models to measure: random weights in a named shape, written as a model folder, or any local folder.

Both sides of a comparison load the same files. Random weights cost the same time as trained ones; the tiny
preset is scaled so that its greedy answers vary, which lets the two sides' tokens be compared.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model folder and what the benchmark needs to know of it. `dtype` None: quantised or unnamed."""

    name: str
    folder: Path
    vocab: int
    dtype: str | None


@contextlib.contextmanager
def bench_model(name: str, seed: int = 0) -> Iterator[BenchModel]:
    """The folder of a preset, written for the time of the block, or the local folder of that path."""
    if name in PRESETS:
        with tempfile.TemporaryDirectory(prefix="mlxrun-bench-") as folder:
            write_model(Path(folder), PRESETS[name], seed)
            yield describe(name, Path(folder))
    elif (Path(name) / "config.json").is_file():
        yield describe(Path(name).resolve().name, Path(name))
    else:
        raise ConfigError(
            f"--model {name}: neither a preset ({', '.join(PRESETS)}) nor a local folder with a config.json"
        )


def describe(name: str, folder: Path) -> BenchModel:
    """Read what config.json says; multimodal models keep it in `text_config`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
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


def _write_weights(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx

    # isort: split
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3

    model = qwen3.Model(qwen3.ModelArgs.from_dict(dict(config)))
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[config["dtype"]]
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))
    weights = {}
    for path, value in tree_flatten(model.parameters()):
        weights[path] = _random(path, value.shape, next(keys)).astype(dtype)
        mx.eval(weights[path])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _random(path: str, shape: tuple[int, ...], key: Any) -> Any:
    """Norms are ones. Matrices keep their input's size, a little more in the middle so that depth matters."""
    import mlx.core as mx

    if len(shape) == 1:
        return mx.ones(shape)
    gain = {"embed_tokens": shape[-1] ** 0.5, "lm_head": 2.0}
    scale = next((g for part, g in gain.items() if part in path), 1.6) / shape[-1] ** 0.5
    return mx.random.normal(shape, key=key) * scale
