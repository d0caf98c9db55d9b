"""`python -m benchmarks embeddings`: texts of mixed lengths, one after the other and together.

Both sides are the engine itself, on one model: texts that are sent one by one, each after the vector of the
one before, and the same texts sent at once. Without `--model` it is a random encoder of MiniLM-L6's shape.
Steps have no limit of time, as in `mlxrun batch`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine

LENGTHS = (4, 160)  # tokens, drawn so that short texts are as frequent as long ones on a logarithmic scale
VOCABULARY, SIZE, INNER, LAYERS, HEADS, POSITIONS = 30_522, 384, 1536, 6, 12, 512


def run_embedding_bench(config: Config, model: str | None, texts: int, seed: int) -> dict[str, Any]:
    """Times, texts and tokens a second of both sides, their ratios, and the largest difference of vectors."""
    with tempfile.TemporaryDirectory() as scratch:
        path = model or str(write_random_encoder(Path(scratch) / "random-minilm", seed))
        engine = _build(replace(config, model=replace(config.model, path=path)))
        requests = make_requests(texts, min(VOCABULARY, len(engine.model_info.tokenizer)), seed)
        compute_together(engine, requests[:32])  # first forwards cost more
        started = _read_clocks()
        alone = [compute_together(engine, [request])[0] for request in requests]
        middle = _read_clocks()
        together = compute_together(engine, requests)
        ended = _read_clocks()
    tokens = sum(len(request.prompt) for request in requests)
    sides = {"one by one": middle - started, "together": ended - middle}
    ratios = sides["one by one"] / sides["together"]
    return {
        "model": path if model else "random, MiniLM-L6's shape",
        "texts": texts,
        "tokens": tokens,
        "sides": {
            name: {
                **{"seconds": float(s), "processor_seconds": float(processor)},
                **{"texts_per_second": float(texts / s), "tokens_per_second": float(tokens / s)},
            }
            for name, (s, processor) in sides.items()
        },
        "ratio": float(ratios[0]),
        "processor_ratio": float(ratios[1]),
        "largest_difference": float(np.abs(np.stack(alone) - np.stack(together)).max()),
    }


def _read_clocks() -> np.ndarray[Any, Any]:
    """Seconds, and seconds of processor time of all threads: other programs change this less."""
    return np.array([time.perf_counter(), time.process_time()])


def print_embedding_report(report: Mapping[str, Any]) -> None:
    """Print a table of both sides."""
    console = make_console(None)
    cells = [
        (
            *(name, f"{s['seconds']:.2f} s", f"{s['processor_seconds']:.2f} s"),
            *(f"{s['texts_per_second']:.0f}", f"{s['tokens_per_second']:.0f}"),
        )
        for name, s in report["sides"].items()
    ]
    titles = ("texts", "time", "processor time", "texts/s", "tokens/s")
    console.print(make_table(titles, 1, cells, console.is_terminal))
    console.print(
        f"{report['model']}: {report['texts']} texts, {report['tokens']} tokens; together "
        f"{report['ratio']:.1f} times as fast, {report['processor_ratio']:.1f} times by processor time; "
        f"largest difference {report['largest_difference']:.1e}"
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


def compute_together(engine: Engine, requests: Sequence[Request]) -> list[np.ndarray[Any, Any]]:
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
