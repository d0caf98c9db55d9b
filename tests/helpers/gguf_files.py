"""Writes GGUF files, as llama.cpp's converter would make them of the tiny models: names, permuted rows,
quantized blocks and metadata. It shares nothing with the code that reads them.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.tiny.byte_tokenizer import CHATML, EOS, PAD, TOKENS, save_tokenizer, write_json
from tests.helpers import text_models

Array = np.ndarray[Any, Any]
Tensor = tuple[str, tuple[int, ...], bytes]  # type, shape, data
TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
PERMUTED = ("llama", "smollm3")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CONFIG = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def build_folder(folder: Path, family: str, **config: Any) -> Path:
    """A tiny model of the family as a folder, in the layout of its original checkpoint."""
    made = {"model_type": family, **CONFIG, **config}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(dict(made)))
    folder.mkdir(parents=True)
    text_models.save_weights(model, folder, 0, tied=made["tie_word_embeddings"])
    write_json(folder / "config.json", made)
    save_tokenizer(folder)
    return folder


def convert(
    folder: Path, file: Path, kind: str = "F32", more: Mapping[str, Tensor] | None = None, **extra: Any
) -> Path:
    """Write the folder's model as a GGUF file with matrices of this type. What they are worth then replaces
    the folder's own weights. `more`: further tensors. `extra`: further metadata, with `__` for dots; None
    leaves a key out."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: np.array(value) for name, value in mx.load(str(folder / "model.safetensors")).items()}
    tensors = dict(more or {})
    for name, value in weights.items():
        own = kind if value.ndim == 2 else "F32"
        weights[name] = unpack(pack(value, own), own, value.shape)
        tensors[rename(name)] = (own, value.shape, pack(permute(name, value, config), own))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.array(value) for name, value in weights.items()}
    )
    metadata = make_metadata(config) | {key.replace("__", "."): value for key, value in extra.items()}
    return write_gguf(file, {k: v for k, v in metadata.items() if v is not None}, tensors)


def rename(name: str) -> str:
    """The tensor's name in GGUF files."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def permute(name: str, value: Array, config: Mapping[str, Any]) -> Array:
    """Rows of queries and keys with the rotary pairs side by side, for families that are stored so."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if config["model_type"] not in PERMUTED or part not in heads:
        return value
    parts = value.reshape(heads[part], 2, value.shape[0] // heads[part] // 2, *value.shape[1:])
    return parts.swapaxes(1, 2).reshape(value.shape)


def make_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, and of the byte-level tokenizer that all tiny models have."""
    family = config["model_type"]
    tokenizer = json.loads(_read_tokenizer())
    tokens = dict(tokenizer["model"]["vocab"])
    kinds = dict.fromkeys(tokens, 1)
    for added in tokenizer["added_tokens"]:
        tokens[added["content"]] = added["id"]
        kinds[added["content"]] = 3 if added["special"] else 4
    ordered = sorted(tokens, key=tokens.__getitem__)
    return {
        "general.architecture": family,
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": config["head_dim"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ordered,
        "tokenizer.ggml.token_type": [kinds[token] for token in ordered],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.chat_template": CHATML,
    }


def _read_tokenizer() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        return (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")


# -- blocks -----------------------------------------------------------------------------------------------


def pack(value: Array, kind: str) -> bytes:
    """The matrix in the file's form."""
    if kind in ("F32", "F16"):
        return value.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()
    if kind == "BF16":
        return (value.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = value.reshape(-1, 32)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        quants = np.rint(blocks / _avoid_zero(scale)).clip(-127, 127).astype("i1")
        return np.hstack([scale.view("u1"), quants.view("u1")]).tobytes()
    low = blocks.min(1, keepdims=True)
    if kind == "Q4_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 8).astype("<f2")
        low, heads = scale.astype("f4") * -8, [scale]
    else:
        scale = ((blocks.max(1, keepdims=True) - low) / 15).astype("<f2")
        heads = [scale, low.astype("<f2")]
        low = heads[1].astype("f4")
    quants = np.rint((blocks - low) / _avoid_zero(scale)).clip(0, 15).astype("u1")
    nibbles = quants[:, :16] | quants[:, 16:] << 4
    return np.hstack([*(head.view("u1") for head in heads), nibbles]).tobytes()


def _avoid_zero(scale: Array) -> Array:
    """The scales as divisors: blocks of zeros have none."""
    return np.where(scale == 0, 1, scale).astype("f4")


def unpack(data: bytes, kind: str, shape: tuple[int, ...]) -> Array:
    """What the packed matrix is worth, in float32."""
    if kind in ("F32", "F16"):
        return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype("f4").reshape(shape)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    blocks = np.frombuffer(data, "u1").reshape(-1, size)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype("f4")
    if kind == "Q8_0":
        return (np.ascontiguousarray(blocks[:, 2:]).view("i1") * scale).reshape(shape).astype("f4")
    nibbles = blocks[:, -16:]
    quants = np.hstack([nibbles & 15, nibbles >> 4]).astype("f4")
    low = scale * -8 if kind == "Q4_0" else np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype("f4")
    return (quants * scale + low).reshape(shape).astype("f4")


# -- the file ---------------------------------------------------------------------------------------------


def write_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A GGUF file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, packed) in tensors.items():
        dims = tuple(reversed(shape))
        head += _string(name) + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, TYPE_NUMBERS[kind], len(data)
        )
        data += packed + b"\0" * (-len(packed) % 32)
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return file


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """The number of the value's type, and the value."""
    kind, packed = _pack_value(value)
    return struct.pack("<I", kind) + packed


def _pack_value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case list():
            packed = [_pack_value(each) for each in value]
            kind = packed[0][0] if packed else 8
            return 9, struct.pack("<IQ", kind, len(value)) + b"".join(data for _, data in packed)
    raise TypeError(value)
