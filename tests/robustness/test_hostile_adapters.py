"""LoRA adapters whose files are damaged, huge or no files at all: each is refused in a sentence when the
model is loaded. What servers do with several adapters is in test_mixed_adapters.py.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.config.contradictions import check_adapter_names
from mlxrun.config.settings import Config, EngineSettings, ModelSettings
from mlxrun.core.errors import MAX_MESSAGE, ConfigError, MlxrunError
from mlxrun.model import lora, model_loading
from mlxrun.model.load import loader
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.model_loading import load_model
from tests.helpers.lora_adapters import make_adapter
from tests.helpers.storm_counts import count

Array = np.ndarray[Any, Any]
Edit = Callable[[Path], object]
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(EMBEDDED, tmp_path_factory.mktemp("good") / "adapter", scale=30.0)


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_bytes((good / name).read_bytes())
    return folder


def load(folder: Path, *, alone: bool = False) -> None:
    """Load the embedded model with this adapter, as all commands do. Raises as they do."""
    settings = ModelSettings(adapter=str(folder)) if alone else ModelSettings(adapters={"x": str(folder)})
    config = Config(model=settings, engine=EngineSettings(load_check=False))
    load_model(config, load_model_info(config.model, weights=True))


def with_parameters(**values: Any) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config["lora_parameters"] |= values
        (folder / CONFIG).write_text(json.dumps(config))

    return edit


def with_config(**values: Any) -> Edit:
    return lambda folder: (folder / CONFIG).write_text(
        json.dumps(json.loads((folder / CONFIG).read_text()) | values)
    )


def without(key: str) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        del config[key]
        (folder / CONFIG).write_text(json.dumps(config))

    return edit


def with_file(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def with_weights(change: Callable[[Array], Array], *, most: int = 1000) -> Edit:
    """`most`: how many tensors are changed."""

    def edit(folder: Path) -> None:
        tensors = {name: np.array(value) for name, value in mx.load(str(folder / WEIGHTS)).items()}
        changed = {name: change(tensors[name]) for name in sorted(tensors)[:most]}
        mx.save_safetensors(str(folder / WEIGHTS), {k: mx.array(v) for k, v in (tensors | changed).items()})

    return edit


def with_link(name: str, target: str | None) -> Edit:
    """The file is a link to this one, or a FIFO (None)."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if target is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(target)

    return edit


def with_size(name: str, size: int) -> Edit:
    """The file has so many bytes, most of which the disk does not hold."""
    return lambda folder: os.truncate(folder / name, size)


def put_nan(array: Array) -> Array:
    return np.where(np.arange(array.size).reshape(array.shape) == 7, np.nan, array).astype(array.dtype)


CASES: dict[str, tuple[Edit, str]] = {
    "a kind that nobody trains": (
        with_config(fine_tune_type="lorra"),
        r"fine_tune_type is 'lorra', which is not one of lora, dora, full",
    ),
    "one NaN": (with_weights(put_nan, most=1), "lora_a: it has numbers that are not finite"),
    "infinite": (with_weights(lambda a: a + np.float32(np.inf)), "it has numbers that are not finite"),
    "enormous": (with_weights(lambda a: a * np.float32(1e38)), "NaN"),
    "transposed": (with_weights(np.transpose), "of shape (4, 448), where the model has"),
    "no rows": (with_weights(lambda a: a[:0]), "of shape (0, 4), where the model has"),
    "whole numbers": (with_weights(lambda a: a.astype(np.int8)), "int8 of shape"),
    "a rank of 10^12": (with_parameters(rank=10**12), "rank is 1000000000000, which is not a whole number"),
    "a rank of 2^64": (with_parameters(rank=2**64), "rank is 18446744073709551616, which is not"),
    "a rank of 10^6": (with_parameters(rank=10**6), "rank is 1000000 in adapter_config.json, the"),
    "a rank of 0": (with_parameters(rank=0), "rank is 0, which is not a whole number from 1"),
    "a rank in words": (with_parameters(rank="4"), "lora_parameters.rank is '4', which is not a whole"),
    "no rank": (with_parameters(rank=None), "lora_parameters.rank is None, which is not a whole"),
    "a scale of NaN": (with_parameters(scale=float("nan")), "scale is nan, which is not a finite number"),
    "a scale of 10^400": (with_parameters(scale=10**400), "which is not a finite number"),
    "a scale in words": (with_parameters(scale="x"), "scale is 'x', which is not a finite number"),
    "no scale": (with_parameters(scale=None), "scale is None, which is not a finite number"),
    "a dropout of NaN": (with_parameters(dropout=float("nan")), "dropout is nan, which is not a number from"),
    "keys in one string": (with_parameters(keys="q_proj"), "keys is 'q_proj', which is not a list"),
    "keys of objects": (with_parameters(keys=[{}]), "keys is [{}], which is not a list of strings"),
    "layers of NaN": (with_config(num_layers=float("nan")), "num_layers is nan, which is not a whole number"),
    "parameters in a list": (with_config(lora_parameters=[]), "lora_parameters is [], which is not"),
    "a deep config": (with_file(CONFIG, "[" * 100_000), "nested too deeply"),
    "a long number": (with_file(CONFIG, '{"num_layers": ' + "9" * 100_000 + "}"), "thousands of digits"),
    "a large config": (with_size(CONFIG, 1 << 40), f"{CONFIG}: it has more than 1,048,576 bytes"),
    "no parameters": (without("lora_parameters"), f"{CONFIG}: lora_parameters is missing"),
    "parameters without a scale": (with_config(lora_parameters={"rank": 4}), "parameters.scale is missing"),
    "no weights": (with_size(WEIGHTS, 0), "the file has 0 bytes only"),
    "a deep header": (with_file(WEIGHTS, struct.pack("<Q", 10**5) + b"[" * 10**5), "nested too deeply"),
    "a config that is a FIFO": (with_link(CONFIG, None), "it is a FIFO"),
    "a config that is a device": (with_link(CONFIG, "/dev/zero"), "it is a device"),
    "a config that is itself": (with_link(CONFIG, CONFIG), "has no adapter_config.json"),
    "weights that are a FIFO": (with_link(WEIGHTS, None), "has no adapters.safetensors"),
    "weights that are a device": (with_link(WEIGHTS, "/dev/zero"), "has no adapters.safetensors"),
    "weights of a terabyte": (with_size(WEIGHTS, 1 << 40), "and the file has 10995116"),
    "a header of a terabyte": (with_file(WEIGHTS, struct.pack("<Q", 1 << 40) + b"{}"), "its header would"),
}  # fmt: skip


PARAMETERS = {"rank": 4, "scale": 1.0, "dropout": 0.0}


@pytest.mark.parametrize(
    ("config", "text", "vision"),
    [
        ({"num_layers": 2, "lora_parameters": PARAMETERS}, "", ""),
        ({"lora_parameters": PARAMETERS}, "num_layers is missing", ""),
        ({"num_layers": 2, "rank": 4}, "lora_parameters is missing", ""),
        ({"fine_tune_type": "full"}, "", ""),
        ({}, "lora_parameters is missing", "lora_parameters is missing"),
    ],
)
def test_each_library_has_what_it_needs(config: dict[str, Any], text: str, vision: str) -> None:
    for said, is_vision in ((text, False), (vision, True)):
        with pytest.raises(ConfigError, match=f"c: {said}") if said else nullcontext():
            lora._check_needed(config, Path("c"), vision=is_vision)


def refuse(folder: Path, *, alone: bool = False) -> str:
    """How the adapter is refused."""
    with pytest.raises(MlxrunError) as caught:
        load(folder, alone=alone)
    text = str(caught.value)
    assert len(text.encode()) <= MAX_MESSAGE and text.isprintable(), text
    count("damaged adapters refused")
    return text


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_adapter_is_refused_in_a_sentence(name: str, damaged: Path) -> None:
    edit, said = CASES[name]
    edit(damaged)
    assert said in refuse(damaged)
    text = refuse(damaged, alone=True)
    assert said in text or "the model computes NaN" in text


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="there is no such file to link to")
def test_a_file_that_cannot_be_read_is_named(damaged: Path) -> None:
    with_link("notes", "/proc/self/mem")(damaged)
    for alone in (False, True):
        assert "adapter/notes: it cannot be read: Input/output error" in refuse(damaged, alone=alone)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 100, 5000])
def test_a_cut_adapter_is_refused(cut: int, damaged: Path) -> None:
    os.truncate(damaged / WEIGHTS, (damaged / WEIGHTS).stat().st_size - cut)
    assert "the header of the weights cannot be used" in refuse(damaged)


def test_an_adapter_that_is_written_meanwhile_is_refused(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is of the files before: the prefix cache would hold what other weights have computed."""
    real = loader.read_adapters

    def read(*args: Any, **more: Any) -> Any:
        with_weights(lambda a: a * 2)(damaged)
        return real(*args, **more)

    monkeypatch.setattr(loader, "read_adapters", read)
    assert "were changed while the model was loaded; start again" in refuse(damaged)
    monkeypatch.setattr(loader, "check_digests", lambda settings, info: None)
    load(damaged)  # the mutation twin


@pytest.mark.parametrize(
    ("name", "owner", "guard", "harmless"),
    [
        ("one NaN", lora, "_list_infinite", lambda tensors, names: []),
        ("enormous", model_loading, "check_adapters", lambda adapter: None),
        ("a rank in words", lora, "_check_values", lambda config, path: None),
    ],
)
def test_without_its_guard_an_adapter_is_not_refused_so(
    name: str,
    owner: Any,
    guard: str,
    harmless: Callable[..., Any],
    damaged: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutation twins: a NaN is taken, or noticed later or in the words of a library."""
    edit, said = CASES[name]
    edit(damaged)
    monkeypatch.setattr(owner, guard, harmless)
    try:
        load(damaged)
    except ConfigError as error:
        assert said not in str(error)


@pytest.mark.parametrize("own", ["one", "big:one", "embedded:one"])
def test_a_name_that_means_the_model_and_an_adapter_is_refused(own: str) -> None:
    def check(*names: str) -> str | None:
        return check_adapter_names(Config(model=ModelSettings(names=names, adapters={"one": "/x"})))

    assert check("big", own) == f"{own!r} is one of model.names too"
    assert check("big", "small:one") is None
