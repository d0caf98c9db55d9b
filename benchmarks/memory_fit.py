"""`python -m benchmarks memory-fit`: what `mlxrun fit` predicts, beside MLX's own count, on thirteen shapes.

Each shape is a model of random weights, of some hundred MB. It is loaded by the engine, and rows of equal
length run on it. The peaks of both are those of MLX's counter. The prefix cache is off, since it takes what
is free.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrun.cli.bench.models import write_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from mlxrun.model.load.model_info import LoadedModelInfo

ROWS, PROMPT, OUTPUT = 6, 600, 8

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 16384,
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
_EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
# Parts of config.json, and of mlxrun's own config below `model`.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense, few keys": ({"model_type": "qwen3", "num_key_value_heads": 4}, {}),
    "dense, all heads": ({"model_type": "llama"}, {}),
    "large vocabulary": (
        {"model_type": "qwen3", "vocab_size": 65536, "num_hidden_layers": 4, "tie_word_embeddings": True},
        {},
    ),
    "windows": (
        {
            "model_type": "gemma3_text",
            "sliding_window": 256,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 64,
            "rope_local_base_freq": 10000.0,
        },
        {},
    ),
    "windows and experts": (
        {
            "model_type": "gpt_oss",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 768,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        {},
    ),
    "hybrid, linear attention": (
        {
            "model_type": "qwen3_next",
            **_EXPERTS,
            "full_attention_interval": 3,
            "linear_num_value_heads": 12,
            "linear_num_key_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "shared_expert_intermediate_size": 512,
            "partial_rotary_factor": 0.5,
        },
        {},
    ),
    "hybrid, state space": (
        {
            "model_type": "falcon_h1",
            "mamba_d_ssm": 768,
            "mamba_d_head": 64,
            "mamba_n_heads": 12,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "key_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
        },
        {},
    ),
    "latent attention": (
        {
            "model_type": "deepseek_v3",
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "kv_lora_rank": 256,
            "q_lora_rank": 384,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        {},
    ),
    "experts": ({"model_type": "qwen3_moe", **_EXPERTS}, {}),
    "4 bit, kept": (
        {"model_type": "qwen3", "num_hidden_layers": 16, "quantization": {"group_size": 64, "bits": 4}},
        {"dequantize": "never"},
    ),
    "4 bit, held": (
        {"model_type": "qwen3", "quantization": {"group_size": 64, "bits": 4}},
        {"dequantize": "always"},
    ),
    "convolutions": (
        {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 3,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 768,
            "block_ff_dim": 2048,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        {},
    ),
}


VISION_SHAPE = "images and text"
IMAGE_SHAPE = "an image"  # of the same model: one row, whose image of so many pixels a side is encoded
SIDE = 448
_VISION: dict[str, dict[str, Any]] = {
    "text_config": {
        **{
            key: _COMMON[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "head_dim")
        },
        **{key: _COMMON[key] for key in ("num_attention_heads", "num_key_value_heads")},
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [16, 8, 8]},
    },
    "vision_config": {
        **{"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "depth": 6, "out_hidden_size": 768},
        "deepstack_visual_indexes": [1, 3],
    },
}
NAMES = (*SHAPES, VISION_SHAPE, IMAGE_SHAPE)


def measure_shape(name: str, rows: int = ROWS, prompt: int = PROMPT, output: int = OUTPUT) -> dict[str, Any]:
    """Bytes of one shape, predicted and measured: at most while it is loaded, and while it runs."""
    import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx
    from mlxrun.model.load.model_info import load_model_info
    from mlxrun.model.machine.device import resolve_config

    sees = name not in SHAPES
    settings = {} if sees else SHAPES[name][1]
    with tempfile.TemporaryDirectory(prefix="mlxrun-fit-") as scratch:
        folder = Path(scratch) / "model"
        config = Config()
        config = replace(
            config,
            model=replace(config.model, path=str(folder), **settings),
            scheduler=replace(config.scheduler, max_running=rows, step_ms=0),
            cache=replace(config.cache, backend="none"),
        )
        if sees:
            from benchmarks.tiny.random_models import read_vision_info, write_vision_model

            write_vision_model("qwen3_vl", folder, sizes=_VISION)
            file = folder / "preprocessor_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"max_pixels": SIDE * SIDE}))
            info: LoadedModelInfo = read_vision_info("qwen3_vl", folder)
        else:
            folder.mkdir()
            write_model(folder, _COMMON | SHAPES[name][0], 0)
            info = load_model_info(config.model, weights=True, announce=False)
        requests = _make_requests(rows, prompt, output)
        predicted = _predict(resolve_config(config), info, rows, prompt, output)
        if name == IMAGE_SHAPE:
            requests, predicted["run"] = _predict_image(config, info, output)
        return {"predicted": predicted, "measured": _measure(config, info, requests)}


def _predict(config: Config, info: LoadedModelInfo, rows: int, prompt: int, output: int) -> dict[str, int]:
    from mlxrun.model.fit.outline import load_outline
    from mlxrun.model.fit.prediction import predict_memory

    found = predict_memory(config, load_outline(config, info), rows, prompt, output)
    return {"weights": found.weights, "load": found.load, "run": found.run}


def _predict_image(config: Config, info: LoadedModelInfo, output: int) -> tuple[list[Request], int]:
    """A request with an image, and the predicted peak."""
    from mlxrun.model.fit.outline import load_outline
    from mlxrun.model.fit.prediction import predict_encoding
    from mlxrun.model.load_check.media_prompts import make_image_prompt

    outline, made = load_outline(config, info), make_image_prompt(info, SIDE)
    encoding = predict_encoding(outline, SIDE)
    assert encoding is not None
    params = SamplingParams(max_tokens=output)
    request = Request("image", made.ids, params, made.image_spans, made.media, made.image_digests)
    return [request], outline.weights + encoding


def _make_requests(rows: int, prompt: int, output: int) -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            str(row),
            tuple(rng.randrange(2, 250) for _ in range(prompt)),  # which every vocabulary has
            SamplingParams(max_tokens=output),
        )
        for row in range(rows)
    ]


def _measure(config: Config, info: LoadedModelInfo, requests: Iterable[Request]) -> dict[str, int]:
    from mlxrun.engine.build import build_engine
    from mlxrun.model.machine.device import read_peak, start_measuring

    before = start_measuring(drop_pool=True)
    engine = build_engine(config, info)
    load = read_peak() - before
    weights = start_measuring(drop_pool=True) - before
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    run = read_peak() - before
    engine.held.close()
    return {"weights": weights, "load": load, "run": run}


def run_fit_bench(
    names: Iterable[str], rows: int, prompt: int, output: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The report of these shapes. `ratio`: the predicted peak by the measured one."""
    found = {}
    for name in names:
        say(name)
        sides = measure_shape(name, rows, prompt, output)
        peaks = {side: max(sizes["load"], sizes["run"]) for side, sizes in sides.items()}
        found[name] = sides | {"ratio": round(peaks["predicted"] / peaks["measured"], 3)}
    return {
        "model": "random weights",
        "shape": {"rows": rows, "prompt_tokens": prompt, "output_tokens": output},
        "workloads": found,
    }


def print_fit_report(report: Mapping[str, Any]) -> None:
    """Print a line for each shape."""
    console = make_console(None)
    titles = ("model", "load", "measured", "run", "measured", "peak, predicted by measured")
    cells = [
        (
            name,
            *(
                format_rounded(found[side][key])
                for key in ("load", "run")
                for side in ("predicted", "measured")
            ),
            f"{found['ratio']:.3f}",
        )
        for name, found in report["workloads"].items()
    ]
    console.print(make_table(titles, 1, cells, console.is_terminal))
