"""`python -m benchmarks embeddings`: texts of mixed lengths in the engine, and in mlx-vlm.

The sides take turns in one process, with one BLAS. The engine gets all texts at once, and each text after the
vector of the one before. mlx-vlm's model is called as its server calls it: for one request of all texts, and
for requests of one text. "products alone" multiplies as many tokens by all weights of the model and does
nothing else: no side can take less. Without `--model` it is a random encoder of MiniLM-L6's shape. Steps have
no limit of time, as in `mlxrun batch`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine

LENGTHS = (4, 160)  # tokens, drawn so that short texts are as frequent as long ones on a logarithmic scale
VOCABULARY, SIZE, INNER, LAYERS, HEADS, POSITIONS = 30_522, 384, 1536, 6, 12, 512
TOGETHER, PRODUCTS = "mlxrun, together", "products alone"
PRODUCT_TOKENS = 512  # that are multiplied at once
Vectors: TypeAlias = Sequence[np.ndarray[Any, Any]]
Clocks: TypeAlias = Mapping[str, float]


def run_embedding_bench(
    config: Config, model: str | None, texts: int, seed: int, turns: int
) -> dict[str, Any]:
    """The times of each side, medians over turns of their ratios to the engine's, and the largest difference
    of vectors from its."""
    from mlxrun.model.machine.device import describe_device

    with tempfile.TemporaryDirectory() as scratch:
        path = model or str(write_random_encoder(Path(scratch) / "random-minilm", seed))
        engine = _build(replace(config, model=replace(config.model, path=path)))
        requests = make_requests(texts, min(VOCABULARY, len(engine.model_info.tokenizer)), seed)
        sides = _list_sides(engine, Path(path))
        for compute in sides.values():
            compute(requests[:32])  # first forwards cost more
        runs: dict[str, list[Clocks]] = {name: [] for name in sides}
        vectors: dict[str, Vectors] = {}
        for turn in range(turns):
            for name in sides if turn % 2 else reversed(sides):
                started = _read_clocks()
                vectors[name] = sides[name](requests)
                runs[name].append({key: value - started[key] for key, value in _read_clocks().items()})
        wanted = np.stack(vectors.pop(TOGETHER))
        device = describe_device(config.engine)
    return {
        "model": path if model else "random, MiniLM-L6's shape",
        "device": device,
        "texts": texts,
        "tokens": sum(len(request.prompt) for request in requests),
        "sides": {name: _summarize(found, runs[TOGETHER]) for name, found in runs.items()},
        "largest_difference": {
            name: float(np.abs(np.stack(found) - wanted).max()) for name, found in vectors.items() if found
        },
    }


def _read_clocks() -> dict[str, float]:
    """Seconds, and seconds of processor time of all threads: other programs change this less."""
    return {"seconds": time.perf_counter(), "processor_seconds": time.process_time()}


def _summarize(runs: Sequence[Clocks], ours: Sequence[Clocks]) -> dict[str, Any]:
    """A side's times, their medians, and the medians over turns of their ratios to the engine's."""
    return {
        "runs": runs,
        "median": {clock: median(run[clock] for run in runs) for clock in runs[0]},
        "ratio": {
            clock: median(run[clock] / own[clock] for run, own in zip(runs, ours, strict=True))
            for clock in runs[0]
        },
    }


def _list_sides(engine: Engine, folder: Path) -> dict[str, Callable[[Sequence[Request]], Vectors]]:
    """By their names, what computes the vectors of requests. That of the products alone gives none."""
    from mlx_vlm.embedding_loader import load_embedding_model

    peer = load_embedding_model(folder)
    return {
        TOGETHER: partial(compute_together, engine),
        "mlxrun, one by one": partial(_compute_alone, partial(compute_together, engine)),
        "mlx-vlm, together": partial(_compute_by_peer, peer),
        "mlx-vlm, one by one": partial(_compute_alone, partial(_compute_by_peer, peer)),
        PRODUCTS: partial(_compute_products, peer),
    }


def _compute_alone(compute: Callable[[Sequence[Request]], Vectors], requests: Sequence[Request]) -> Vectors:
    return [compute([request])[0] for request in requests]


def _compute_by_peer(peer: Any, requests: Sequence[Request]) -> Vectors:
    """As mlx-vlm's server, which pads all texts of a request to the longest."""
    import mlx.core as mx

    longest = max(len(request.prompt) for request in requests)
    ids, mask = np.zeros((2, len(requests), longest), np.int64)
    for row, request in enumerate(requests):
        ids[row, : len(request.prompt)], mask[row, : len(request.prompt)] = request.prompt, 1
    return list(np.array(peer(mx.array(ids), attention_mask=mx.array(mask)).text_embeds))


def _compute_products(peer: Any, requests: Sequence[Request]) -> Vectors:
    import mlx.core as mx
    import mlx.nn as nn

    weights = [layer.weight for _, layer in peer.named_modules() if isinstance(layer, nn.Linear)]
    left = sum(len(request.prompt) for request in requests)
    while left > 0:
        count = min(left, PRODUCT_TOKENS)
        for weight in weights:
            mx.eval(mx.ones((count, weight.shape[1])) @ weight.T)
        left -= count
    return []


def print_embedding_report(report: Mapping[str, Any]) -> None:
    """Print a table of the sides."""
    console = make_console(None)
    cells = [
        (
            *(name, *(f"{value:.2f} s" for value in side["median"].values())),
            *(f"{value:.2f}" for value in side["ratio"].values()),
        )
        for name, side in report["sides"].items()
    ]
    titles = ("texts", "time", "processor time", "× time", "× processor time")
    console.print(make_table(titles, 1, cells, console.is_terminal))
    differences = ", ".join(f"{name} {value:.1e}" for name, value in report["largest_difference"].items())
    console.print(
        f"{report['model']}: {report['texts']} texts, {report['tokens']} tokens; "
        f"vectors differ from those of {TOGETHER} by at most: {differences}"
    )


def make_requests(count: int, vocabulary: int, seed: int) -> list[Request]:
    """Texts of random tokens."""
    rng = random.Random(f"texts {seed}")
    low, high = (np.log(length) for length in LENGTHS)
    sizes = [round(float(np.exp(rng.uniform(low, high)))) for _ in range(count)]
    params = SamplingParams(max_tokens=0)
    return [
        Request(str(at), tuple(rng.randrange(10, vocabulary) for _ in range(size)), params, pooled=True)
        for at, size in enumerate(sizes)
    ]


def compute_together(engine: Engine, requests: Sequence[Request]) -> Vectors:
    """The vectors of requests that are all sent at once."""
    for request in requests:
        engine.add(request)
    found: dict[str, bytes] = {}
    while engine.busy:
        found |= {event.request_id: event.vector for event in engine.step()}
    return [np.frombuffer(found[request.id], "<f4") for request in requests]


def _build(config: Config) -> Engine:
    from mlxrun.engine.build import build_engine

    return build_engine(replace(config, scheduler=replace(config.scheduler, max_queue=1_000_000, step_ms=0)))


def write_random_encoder(folder: Path, seed: int) -> Path:
    """A BERT of random float32 weights, with mean pooling and a tokenizer of numbered words."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = {"hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    files: dict[str, Any] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": POSITIONS,
        },
        "config.json": {
            **{"model_type": "bert", "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS},
            **{"num_attention_heads": HEADS, "type_vocab_size": 2, **shape},
        },
        "modules.json": [
            {"path": path, "type": f"sentence_transformers.models.{path.partition('_')[2] or 'Transformer'}"}
            for path in ("", "1_Pooling", "2_Normalize")
        ],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    rng = np.random.default_rng(seed)
    weights = {
        name: np.ones(size, np.float32)
        if "LayerNorm.weight" in name
        else (rng.standard_normal(size) / np.sqrt(size[-1])).astype(np.float32)
        for name, size in _list_shapes().items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def _list_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, SIZE),
        "embeddings.position_embeddings.weight": (POSITIONS, SIZE),
        "embeddings.token_type_embeddings.weight": (2, SIZE),
        "embeddings.LayerNorm.weight": (SIZE,),
        "embeddings.LayerNorm.bias": (SIZE,),
    }
    for at in range(LAYERS):
        layer = f"encoder.layer.{at}."
        for name, size in (
            *((f"attention.{part}", (SIZE, SIZE)) for part in ("self.query", "self.key", "self.value")),
            ("attention.output.dense", (SIZE, SIZE)),
            ("attention.output.LayerNorm", (SIZE,)),
            ("intermediate.dense", (INNER, SIZE)),
            ("output.dense", (SIZE, INNER)),
            ("output.LayerNorm", (SIZE,)),
        ):
            found |= {f"{layer}{name}.weight": size, f"{layer}{name}.bias": size[:1]}
    return found
