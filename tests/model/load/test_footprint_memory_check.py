"""A model that memory cannot hold is refused by a sum, before its weights are read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.tiny.byte_tokenizer import write_json
from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.engine import build
from mlxrun.model.load import footprint
from mlxrun.model.load.footprint import check_memory, count_weight_bytes, list_tensor_bytes
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_files import read_json
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.machine.memory_limits import MACHINE, MemoryLimit
from tests.helpers import gguf_files
from tests.helpers.model_fixtures import Zoo


def limit(
    monkeypatch: pytest.MonkeyPatch, left: int, name: str = "ulimit -v", reserves: bool = False
) -> None:
    """Let the process have this limit."""
    found = [MemoryLimit(name, 1 << 40, left, reserves)]
    monkeypatch.setattr(footprint, "list_limits", lambda: found)


def make(folder: Path, **scheduler: Any) -> Config:
    return Config(model=ModelSettings(path=str(folder)), scheduler=SchedulerSettings(**scheduler))


def test_the_sum_has_all_weights_of_a_model(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in memory: of a folder, and of a GGUF file with blocks."""
    folder = gguf_files.build_folder(tmp_path / "llama", "llama")
    file = gguf_files.convert(folder, tmp_path / "m.gguf", "F16")
    for path in (zoo.text("qwen3"), zoo.vision("qwen3_vl"), file):
        config = make(path)
        info = load_model_info(config.model, weights=True)
        needed: list[int] = []
        monkeypatch.setattr(footprint, "explain_shortage", lambda size, *_: needed.append(size))  # noqa: B023
        monkeypatch.setattr(footprint, "CHECK_TOKENS", 0)
        check_memory(config, info)
        model = load_caller(config, info).model
        vocab = footprint._read_vocab_size(info)
        rows = config.scheduler.max_running * vocab * 16
        converted = sum(a.nbytes for _, a in tree_flatten(model.parameters())) // 2 if path == file else 0
        loaded = count_weight_bytes(model)
        assert loaded + rows <= needed[0] <= loaded * 1.3 + converted + rows


def write_float8(folder: Path) -> None:
    """Store most matrices as DeepSeek's checkpoints do: numbers of 8 bits, and a scale for each block."""
    file, tensors, packed = folder / "model.safetensors", dict[str, mx.array](), list[str]()
    for name, array in mx.load(str(file)).items():
        if array.ndim != 2 or "_proj" not in name or "kv_b" in name:
            tensors[name] = array
            continue
        packed.append(name)
        tensors[name] = mx.to_fp8(array)
        tensors[f"{name}_scale_inv"] = mx.ones([-(-size // 128) for size in array.shape])
    mx.save_safetensors(str(file), tensors)
    data = file.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    for name in packed:
        header[name]["dtype"] = "F8_E4M3"  # which mx.load reads, and does not write
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[stop:])
    config = read_json(folder / "config.json")
    own = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write_json(folder / "config.json", config | {"quantization_config": own})


def test_numbers_of_8_bits_count_as_the_library_loads_them(zoo: Zoo, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo.text("deepseek_v3"), tmp_path / "m")
    config = make(folder)
    plain = load_model_info(config.model, weights=True)
    sizes = [sum(loaded for _, loaded in list_tensor_bytes(plain, size)) for size in (2, 4)]
    write_float8(folder)
    info = load_model_info(config.model, weights=True)
    for itemsize, wanted in zip((2, 4), sizes, strict=True):
        found = sum(loaded for _, loaded in list_tensor_bytes(info, itemsize))
        assert wanted <= found <= wanted * 1.01, "with the scales"
    assert sum(own for own, _ in list_tensor_bytes(info, 2)) < sizes[1] * 0.8
    assert count_weight_bytes(load_caller(config, info).model) <= found


def test_too_little_is_refused_before_weights_are_read(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the twin without the check loads them."""
    config = make(zoo.text("llama"))
    limit(monkeypatch, 100_000)
    loaded: list[Any] = []
    monkeypatch.setattr(build, "load_model", lambda *given: loaded.append(given))
    said = r"llama.*: too little memory to load it: weights .* \+ load check .* \+ first rows .* = .*, but "
    with pytest.raises(ModelLoadError, match=said + r"ulimit -v leaves 100\.0 kB of 1\.1 TB"):
        build.build_engine(config)
    assert not loaded
    monkeypatch.setattr(build, "check_memory", lambda *_: None)
    with pytest.raises(AttributeError):
        build.build_engine(config)
    assert loaded


def test_address_space_has_to_hold_threads_too(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(zoo.text("llama"))
    info = load_model_info(config.model, weights=True)
    limit(monkeypatch, 100_000_000)
    check_memory(config, info)
    limit(monkeypatch, 100_000_000, reserves=True)
    with pytest.raises(ModelLoadError, match=r"first rows .* \+ threads and BLAS .* = .*, but ulimit"):
        check_memory(config, info)


def test_a_configured_limit_replaces_what_is_free(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """But no limit of the process; and weights beyond it are refused at once."""
    config = make(zoo.text("llama"), memory_limit=10**9)
    info = load_model_info(config.model, weights=True)
    limit(monkeypatch, 1, MACHINE)
    check_memory(config, info)
    with pytest.raises(ModelLoadError, match="but this machine leaves 1 B"):
        check_memory(make(zoo.text("llama")), info)
    limit(monkeypatch, 1)
    with pytest.raises(ModelLoadError, match="but ulimit -v leaves 1 B"):
        check_memory(config, info)
    limit(monkeypatch, 1, MACHINE)
    said = r"scheduler\.memory_limit: weights .* > limit 1\.0 kB: no request can ever run"
    with pytest.raises(ConfigError, match=said):
        check_memory(make(zoo.text("llama"), memory_limit=1000), info)


def test_a_gpu_is_compared_with_its_own_memory(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(zoo.text("llama"))
    info = load_model_info(config.model, weights=True)
    monkeypatch.setattr(footprint, "uses_gpu", lambda: True)
    monkeypatch.setattr(footprint, "get_memory_limit", lambda: 1000)
    limit(monkeypatch, 1)
    with pytest.raises(ModelLoadError, match="but the device leaves 1.0 kB of 1.0 kB"):
        check_memory(config, info)
    monkeypatch.setattr(footprint, "get_memory_limit", lambda: 0)
    check_memory(config, info)


def test_a_draft_model_counts_with_its_target(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(zoo.text("llama"))
    info = load_model_info(config.model, weights=True)
    needed: list[int] = []
    monkeypatch.setattr(footprint, "explain_shortage", lambda size, *_: needed.append(size))
    check_memory(config, info)
    check_memory(config, info, info)
    assert needed[1] > 1.5 * needed[0]
