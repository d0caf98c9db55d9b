"""Tiny models that give embeddings or scores, as folders: made with numpy, so that the reference library and
mlxrun read the same files (helpers/golden/embeddings.json, written by tools/embedding_golden.py).

Weights depend on the name of the model alone. Tokenizers are word-level, of a few words.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tiny.byte_tokenizer import write_json

WORDS = (
    *("the", "a", "cat", "dog", "sat", "on", "mat", "ran", "far", "and"),
    *("of", "river", "bank", "money", "boat", "water", "blue", "red", "is", "was"),
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|endoftext|>", "yes", "no", "query:")
VOCAB = [*SPECIAL, *WORDS, *(f"word{at}" for at in range(64 - len(SPECIAL) - len(WORDS)))]
TEXTS = (
    "the cat sat on the mat",
    "a dog ran",
    "the river bank and the water of the blue boat was far and the red dog sat on a mat and a cat ran far",
    "money",
    "the bank of the river is blue and the boat is red",
)
QUERY = "the boat on the river"
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_COMMON = {**_SHAPE, "vocab_size": len(VOCAB), "max_position_embeddings": 64, "pad_token_id": 0}
Shapes = dict[str, tuple[int, ...]]


def build_pooling_model(name: str, folder: Path) -> Path:
    """Write the model of this name, one of `MODELS`."""
    config, shapes, extra = MODELS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    _save_weights(folder / "model.safetensors", name, shapes)
    _save_tokenizer(folder, config["max_position_embeddings"], config["model_type"])
    for path, content in extra.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".safetensors"):
            _save_weights(folder / path, f"{name}/{path}", content)
        else:
            write_json(folder / path, content)
    return folder


def make_sentence_files(
    pooling: Mapping[str, Any], *, normalize: bool = True, **others: Any
) -> dict[str, Any]:
    """The files of sentence-transformers; `others`: more files, with `__` for a slash in their names."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if "dense" in others else []), *["Normalize"] * normalize]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": "" if at == 0 else f"{at}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    files = {"1_Pooling/config.json": {"word_embedding_dimension": 32, **pooling}}
    if "dense" in others:
        files["2_Dense/config.json"] = others.pop("dense")
        files["2_Dense/model.safetensors"] = {"linear.weight": (20, 32), "linear.bias": (20,)}
    return {"modules.json": modules, **files, **others.pop("files", {})}


def _save_weights(path: Path, name: str, shapes: Shapes) -> None:
    from safetensors.numpy import save_file

    made = {}
    for key, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(f"{name} {key}".encode())).standard_normal(shape)
        if len(shape) == 1:
            made[key] = (("norm" in key.lower() and key.endswith("weight")) + 0.1 * noise).astype(np.float32)
        else:
            made[key] = (1.5 * noise / np.sqrt(shape[-1])).astype(np.float32)
    save_file(made, path, metadata={"format": "pt"})


def _save_tokenizer(folder: Path, most: int, model_type: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL[:5]))
    end = ("<|endoftext|>", SPECIAL.index("<|endoftext|>"))
    if model_type != "qwen3":
        second = "$B:1 [SEP]:1" if model_type == "bert" else "$B [SEP]"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair=f"[CLS] $A [SEP] {second}",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end[0]}", pair=f"$A {end[0]} $B {end[0]}", special_tokens=[end]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if model_type == "bert" else [])]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": most,
            "model_input_names": inputs,
            **names,
        },
    )


def _make_bert(prefix: str = "", **changes: Any) -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        **_COMMON,
        **changes,
    }
    size, inner = config["hidden_size"], config["intermediate_size"]
    names: Shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
        **_list_pair("embeddings.LayerNorm", (size,)),
    }
    for at in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{at}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            names |= _list_pair(f"{layer}attention.{part}", (size, size))
        names |= _list_pair(f"{layer}attention.output.LayerNorm", (size,))
        names |= _list_pair(f"{layer}intermediate.dense", (inner, size))
        names |= _list_pair(f"{layer}output.dense", (size, inner))
        names |= _list_pair(f"{layer}output.LayerNorm", (size,))
    return config, {prefix + key: shape for key, shape in names.items()}


def _list_pair(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _make_bert_mean() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    """Mean pooling, a Dense module, normalised, and at most 40 tokens."""
    config, shapes = _make_bert()
    dense = {
        "in_features": 32,
        "out_features": 20,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    limits = {"sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False}}
    files = make_sentence_files({"pooling_mode_mean_tokens": True}, dense=dense, files=limits)
    return config, shapes, files


def _make_xlmr() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    """XLM-RoBERTa, whose positions begin behind the padding token's id; the first state, not normalised."""
    config, shapes = _make_bert(
        model_type="xlm-roberta", architectures=["XLMRobertaModel"], type_vocab_size=1, layer_norm_eps=1e-5
    )
    files = make_sentence_files(
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, normalize=False
    )
    return config, shapes, files


def _make_modernbert() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    """ModernBERT with a window that the longer texts cross."""
    config: dict[str, Any] = {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "global_attn_every_n_layers": 3,
        "local_attention": 6,
        "global_rope_theta": 5000.0,
        "local_rope_theta": 100.0,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        **_COMMON,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        "embeddings.tok_embeddings.weight": (config["vocab_size"], size),
        "embeddings.norm.weight": (size,),
        "final_norm.weight": (size,),
    }
    for at in range(config["num_hidden_layers"]):
        layer = f"layers.{at}."
        shapes |= {f"{layer}attn_norm.weight": (size,)} if at else {}
        shapes |= {
            f"{layer}attn.Wqkv.weight": (3 * size, size),
            f"{layer}attn.Wo.weight": (size, size),
            f"{layer}mlp_norm.weight": (size,),
            f"{layer}mlp.Wi.weight": (2 * inner, size),
            f"{layer}mlp.Wo.weight": (size, inner),
        }
    files = make_sentence_files({"pooling_mode_mean_tokens": True})
    return config, shapes, files


def _make_qwen3(prefix: str) -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {"embed_tokens.weight": (config["vocab_size"], size), "norm.weight": (size,)}
    for at in range(config["num_hidden_layers"]):
        layer = f"layers.{at}."
        shapes |= {
            f"{layer}self_attn.{name}_proj.weight": shape
            for name, shape in (("q", (32, size)), ("k", (16, size)), ("v", (16, size)), ("o", (size, 32)))
        }
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (size, inner)}
        shapes |= {f"{layer}{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
    return config, {prefix + key: shape for key, shape in shapes.items()}


def _make_qwen3_embedding() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    """As Qwen3-Embedding: the last state, a prompt for queries, and weights without the name of the trunk."""
    config, shapes = _make_qwen3("")
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    files = make_sentence_files(
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        files={"config_sentence_transformers.json": prompts},
    )
    return config, shapes, files


def _make_qwen3_reranker() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    return *_make_qwen3("model."), {}


def _make_bert_reranker() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    """A cross-encoder whose scores are logits."""
    config, shapes = _make_bert(
        "bert.",
        architectures=["BertForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        sbert_ce_default_activation_function="torch.nn.modules.linear.Identity",
    )
    shapes |= _list_pair("bert.pooler.dense", (32, 32)) | _list_pair("classifier", (1, 32))
    return config, shapes, {}


def _make_xlmr_reranker() -> tuple[dict[str, Any], Shapes, dict[str, Any]]:
    """A cross-encoder whose scores are probabilities."""
    config, shapes = _make_bert(
        "roberta.",
        model_type="xlm-roberta",
        architectures=["XLMRobertaForSequenceClassification"],
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
    )
    shapes |= _list_pair("classifier.dense", (32, 32)) | _list_pair("classifier.out_proj", (1, 32))
    return config, shapes, {}


MODELS: dict[str, Callable[[], tuple[dict[str, Any], Shapes, dict[str, Any]]]] = {
    "bert": _make_bert_mean,
    "xlm-roberta": _make_xlmr,
    "modernbert": _make_modernbert,
    "qwen3": _make_qwen3_embedding,
    "bert-reranker": _make_bert_reranker,
    "xlm-roberta-reranker": _make_xlmr_reranker,
    "qwen3-reranker": _make_qwen3_reranker,
}
EMBEDDING_MODELS = ("bert", "xlm-roberta", "modernbert", "qwen3")
CROSS_ENCODERS = ("bert-reranker", "xlm-roberta-reranker")
