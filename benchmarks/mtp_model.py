"""Models with multi-token-prediction heads for the bench of drafts: a tiny trained one, and random ones.

All are of mimo's family, with its head. The tiny one is trained in two minutes on a CPU. Its language has
words of letters, and each word is followed by one of a few others: what comes inside a word is certain, and
where a word begins it is not. On a GPU it gets layers that add nothing to what the trained ones compute, so
that a step takes the time of a model with as many layers as Qwen3-0.6B.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.tiny.byte_tokenizer import TOKENS, save_tokenizer, write_json
from mlxrun.cli.bench.models import PRESETS, BenchModel, describe_model, open_model
from mlxrun.model.load.model_files import read_json
from mlxrun.model.machine.device import uses_gpu

if TYPE_CHECKING:
    import mlx.core as mx

TRAINED = "trained"  # the name of the tiny model
CONFIG: dict[str, Any] = {
    **TOKENS,
    "model_type": "mimo",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 3,  # of 32: the least that the kernel of pages covers
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
STEPS, BATCH, LENGTH = 300, 6, 256
RATE, WARM_UP = 4e-3, 40
GPU_LAYERS = 28
WORDS, LETTERS = 60, b"abcdefghijklmnopqrstuvwxyz"
FOLLOWERS = (0.7, 0.2, 0.1)  # how likely each word that may follow is
WEIGHTS = (1.0, 0.5, 0.25)  # of the model's loss, and those of the head's first and second token


@contextmanager
def open_trained_model(seed: int, say: Callable[[str], None]) -> Iterator[BenchModel]:
    """The tiny model, trained and written to a temporary folder. Says how often its head is right, which any
    device can tell."""
    with TemporaryDirectory(prefix="mlxrun-bench-") as folder:
        train_mtp_model(Path(folder), say, seed=seed)
        shares = ", ".join(f"{share:.0%}" for share in measure_acceptance(Path(folder), seed))
        say(f"texts of its language go on as the head says, for 1, 2, ... tokens: {shares} of all places")
        if uses_gpu():
            add_layers(Path(folder), GPU_LAYERS)
        yield describe_model(TRAINED, Path(folder))


@contextmanager
def open_model_with_head(name: str, seed: int = 0) -> Iterator[BenchModel]:
    """A preset as a model of mimo's family, with a head of random weights. Its heads of attention have the
    hidden size divided by their number."""
    config = {key: value for key, value in PRESETS[name].items() if key not in ("architectures", "head_dim")}
    config |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
    with open_model(name, seed, config) as model:
        _save_random_head(model.folder, config, seed)
        yield model


def _save_random_head(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    head = _make_head(config)
    mx.random.seed(seed)
    weights = {
        name: mx.ones(array.shape)
        if array.ndim == 1
        else mx.random.normal(array.shape) / array.shape[-1] ** 0.5
        for name, array in tree_flatten(head.parameters())
    }
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[config["dtype"]]
    named = _name_weights({name: array.astype(dtype) for name, array in weights.items()}, config)
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), named, metadata={"format": "mlx"})


def _make_head(config: Mapping[str, Any]) -> Any:
    """A head with weights as its layers draw them."""
    from mlx_lm.models import mimo

    from mlxrun.model.speculation.mtp_head import FORMATS, MTPHead

    layer = mimo.TransformerBlock(mimo.ModelArgs.from_dict(dict(config)))
    return MTPHead(layer, config["hidden_size"], config["rms_norm_eps"], FORMATS["mimo"])


def _name_weights(head: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """The weights of a head by the names of a checkpoint."""
    from mlxrun.model.speculation.mtp_head import FORMATS

    form = FORMATS["mimo"]
    prefix = form.prefix.format(layers=config["num_hidden_layers"])
    names = {part: name for name, part in form.parts.items()}
    found = {}
    for name, array in head.items():
        part, _, kind = name.rpartition(".")
        own = f"{names[part]}.{kind}" if part in names else form.layer + name.removeprefix("layer.")
        found[prefix + own] = array
    return found


class Language:
    """Words of three to seven letters and a space; each is followed by one of three."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._words = [bytes(rng.choices(LETTERS, k=rng.randint(3, 7))) + b" " for _ in range(WORDS)]
        self._followers = [rng.sample(range(WORDS), len(FOLLOWERS)) for _ in range(WORDS)]

    def write(self, size: int, rng: random.Random) -> list[int]:
        """A text of so many tokens."""
        word, text = rng.randrange(WORDS), b""
        while len(text) < size:
            text += self._words[word]
            word = rng.choices(self._followers[word], FOLLOWERS)[0]
        return list(text[:size])


def train_mtp_model(folder: Path, say: Callable[[str], None], steps: int = STEPS, seed: int = 0) -> None:
    """Write a model and its head, trained for so many steps, as a checkpoint."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx import optimizers
    from mlx.utils import tree_flatten
    from mlx_lm.models import mimo

    mx.random.seed(seed)
    both: Any = nn.Module()
    both.model = mimo.Model(mimo.ModelArgs.from_dict(CONFIG))
    both.head = _make_head(CONFIG)
    schedule = optimizers.join_schedules(
        [
            optimizers.linear_schedule(0.0, RATE, WARM_UP),
            optimizers.cosine_decay(RATE, max(steps - WARM_UP, 1), RATE / 20),
        ],
        [WARM_UP],
    )
    optimizer = optimizers.AdamW(schedule, weight_decay=0.01)
    compute = nn.value_and_grad(both, partial(_compute_losses, both))
    language, rng = Language(seed), random.Random(seed + 1)
    for step in range(steps):
        tokens = mx.array([language.write(LENGTH + 3, rng) for _ in range(BATCH)])
        losses, gradients = compute(tokens)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(both, gradients)
        mx.eval(both.parameters(), optimizer.state, losses)
        if step % 50 == 49 or step == steps - 1:
            say(f"step {step + 1}: losses {losses[1].item():.2f}, of the head {losses[2].item():.2f}")
    _save(folder, dict(tree_flatten(both.model.parameters())), dict(tree_flatten(both.head.parameters())))


def _compute_losses(both: Any, tokens: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """What is trained, the loss of the model, and that of its head. `tokens` [rows, n + 3]: from n of them
    the model predicts the next ones, the head those behind, and from its own output those behind them."""
    import mlx.core as mx
    import mlx.nn as nn

    def compare(hidden: mx.array, ahead: int) -> mx.array:
        due = tokens[:, ahead : ahead + hidden.shape[1]]
        return nn.losses.cross_entropy(both.model.lm_head(hidden), due, reduction="mean")

    chained = both.model.model(tokens[:, :-3])
    losses = [compare(chained, 1)]
    for ahead in (1, 2):
        embeds = both.model.model.embed_tokens(tokens[:, ahead : ahead + chained.shape[1]])
        normed, chained = both.head(embeds, chained, "causal", None)
        losses.append(compare(normed, ahead + 1))
    wanted = sum(weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True))
    return wanted, mx.stop_gradient(losses[0]), mx.stop_gradient(losses[1])


def _save(folder: Path, model: dict[str, mx.array], head: dict[str, mx.array]) -> None:
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    named = _name_weights(head, CONFIG)
    mx.save_safetensors(str(folder / "model.safetensors"), model | named, metadata={"format": "mlx"})
    write_json(folder / "config.json", CONFIG)
    save_tokenizer(folder)


def measure_acceptance(folder: Path, seed: int, texts: int = 6, depth: int = 5) -> list[float]:
    """The share of places in new texts where the first token that the trained head drafts is the text's, the
    first two are, and so on. The text's own tokens are what the model is told."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from mlxrun.config.settings import ModelSettings
    from mlxrun.model.load.model_info import load_model_info
    from mlxrun.model.speculation.mtp_head import find_mtp_head, load_mtp_head
    from mlxrun.model.speculation.mtp_rows import MTPRows

    info = load_model_info(ModelSettings(path=str(folder)))
    found = find_mtp_head(info)
    assert not isinstance(found, str), found
    head, model = load_mtp_head(info, found, mx.float32), load_model(folder, strict=False)[0]
    rows = MTPRows(head, model.model.embed_tokens, model.lm_head)
    language, rng = Language(seed), random.Random(f"new texts {seed}")
    written = [language.write(LENGTH, rng) for _ in range(texts)]
    hidden, names = model.model(mx.array(written)), [str(row) for row in range(texts)]
    counts, places = [0] * depth, range(depth, LENGTH - depth - 1)
    for at in places:
        rows.read_step(names, hidden[:, at], mx.array([text[at + 1] for text in written]))
        drafts = rows.draft(dict.fromkeys(names, depth))
        for name, text in zip(names, written, strict=True):
            for size in range(1, depth + 1):
                counts[size - 1] += list(drafts[name][:size]) == text[at + 2 : at + 2 + size]
    return [count / (texts * len(places)) for count in counts]


def add_layers(folder: Path, layers: int) -> None:
    """Give the trained model so many layers, of which the new ones add nothing."""
    import mlx.core as mx

    weights: Any = mx.load(str(folder / "model.safetensors"))
    config, first = read_json(folder / "config.json"), "model.layers.0."
    for name in [name for name in weights if name.startswith(first)]:
        for layer in range(config["num_hidden_layers"], layers):
            weights[name.replace(first, f"model.layers.{layer}.")] = mx.zeros_like(weights[name])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config | {"num_hidden_layers": layers})


def make_prompts(count: int, size: int, seed: int = 0) -> list[Sequence[int]]:
    """Texts of the language that the model with this seed was trained on."""
    language, rng = Language(seed), random.Random(f"prompts {seed}")
    return [language.write(size, rng) for _ in range(count)]
