"""A model that memory cannot hold is refused by a sum, before its weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.engine import build
from mlxrun.model.load import footprint
from mlxrun.model.load.footprint import check_memory, count_weight_bytes
from mlxrun.model.load.loader import load_caller
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
