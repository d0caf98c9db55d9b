"""The prefix cache that a config asks for, and the fingerprint that keeps entries of others away."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.engine import build
from mlxrun.engine.build import build_prefix_cache, compute_fingerprint
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load import model_digests
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.run.model_caller import run_trial_forward
from tests.helpers import engine_driver
from tests.helpers.model_fixtures import Zoo


class Parts:
    """A loaded model, and the caches that it asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = engine_driver.make_config(folder)
        self.model_info: LoadedModelInfo = load_model_info(config.model, weights=True)
        self.cache = run_trial_forward(load_caller(config, self.model_info))[0]
        self.on_disk = self.fingerprint(backend="disk")

    def make_config(self, **options: Any) -> Config:
        return engine_driver.make_config(self.folder, **options)

    def build(self, memory: MemoryBudget | None = None, **options: Any) -> Any:
        config = self.make_config(**options)
        snapshots = SnapshotCodec(self.cache, config.cache.stored_bits)
        return build_prefix_cache(config, self.model_info, snapshots, memory or MemoryBudget())

    def fingerprint(self, **options: Any) -> bytes:
        config = self.make_config(**options)
        return compute_fingerprint(
            config, self.model_info, SnapshotCodec(self.cache, config.cache.stored_bits)
        )


@pytest.fixture(scope="module")
def parts(zoo: Zoo) -> Parts:
    return Parts(zoo.text("llama"))


def test_the_backends(parts: Parts, tmp_path: Path) -> None:
    assert type(parts.build(backend="none")) is NoPrefixCache
    memory = parts.build(backend="memory")
    assert isinstance(memory, PrefixCache) and not memory.survives_restart
    disk = parts.build(backend="disk", disk_path=str(tmp_path / "entries"))
    assert isinstance(disk, PrefixCache) and disk.survives_restart
    disk.shutdown()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="disk_path"):
        parts.build(backend="disk", disk_path=str(tmp_path / "file"))


def test_a_size_that_holds_no_chunk(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused if it was asked for; otherwise there is no cache, and the log says why."""
    with pytest.raises(
        ConfigError, match="cache.memory_bytes: 10 bytes hold less than one chunk of 16 tokens"
    ):
        parts.build(memory_bytes=10)
    small = MemoryBudget(limit=1000, weights=990)
    with caplog.at_level(logging.WARNING):
        assert type(parts.build(small)) is NoPrefixCache
    assert "too small for one chunk of 16 tokens" in caplog.text
    assert isinstance(parts.build(small, memory_bytes=10**6), PrefixCache)


def test_entries_of_anything_else_are_never_found(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chunk, mode, type, number of bits, version, device, library or model has its own."""
    same = parts.fingerprint()
    assert same == parts.fingerprint() == parts.fingerprint(max_running=3, memory_bytes=10**6)
    others = [
        parts.fingerprint(**options)
        for options in ({"chunk": 32}, {"reproducible": True}, {"dtype": "bfloat16"}, {"stored_bits": 8})
    ]
    for name, value in (
        ("FORMAT_VERSION", 2),
        ("get_backend", lambda: "another"),
        ("list_library_versions", lambda: {"mlx": "0.0.1"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            others.append(parts.fingerprint())
    monkeypatch.setattr(
        parts, "model_info", replace(parts.model_info, digests={**parts.model_info.digests, "model": "x"})
    )
    others.append(parts.fingerprint())
    assert len({same, *others}) == len(others) + 1


def test_each_byte_of_large_files_counts_on_disk(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the model reads blocks of them only. Entries in memory end with the engine."""
    for name, size in (("_FULL_HASH_BYTES", 10_000), ("_BLOCK", 16), ("_SAMPLES", 4)):
        monkeypatch.setattr(model_digests, name, size)
    folder = shutil.copytree(zoo.text("llama"), tmp_path / "model")
    before, weights = Parts(folder), folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    after = Parts(folder)
    assert before.model_info.digests["model"] == after.model_info.digests["model"]
    assert before.fingerprint(backend="memory") == after.fingerprint(backend="memory")
    assert before.on_disk != after.on_disk == after.fingerprint(backend="disk")


def test_entries_of_images_are_of_the_libraries_that_make_pixels(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are found by what was sent, of which another version may make other pixels. Entries of text
    outlive these versions."""
    real = build.find_version
    for folder, counts in ((zoo.vision("qwen3_vl"), True), (zoo.text("llama"), False)):
        parts = Parts(folder)
        found = {parts.fingerprint()}
        for name in ("transformers", "pillow", "numpy"):
            with monkeypatch.context() as patch:
                patch.setattr(
                    build, "find_version", lambda each, name=name: "0" if each == name else real(each)
                )
                found.add(parts.fingerprint())
        assert len(found) == (4 if counts else 1)


@pytest.mark.parametrize("reproducible", [True, False])
def test_reproducible_entries_have_the_rounding_of_their_device(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, reproducible: bool
) -> None:
    """A folder of entries may be that of another machine, or of a job with other threads. Without
    engine.reproducible its digits are good enough."""
    found = {parts.fingerprint(reproducible=reproducible)}
    for facts in ({"blas_kernel": "Zen"}, {"blas_kernel": "Haswell"}, {"blas_threads": 2}):
        monkeypatch.setattr(build, "describe_rounding", lambda settings, facts=facts: facts)
        found.add(parts.fingerprint(reproducible=reproducible))
    assert len(found) == (4 if reproducible else 1)


def test_the_caches_of_the_layers_are_part_of_it(parts: Parts, zoo: Zoo) -> None:
    other = Parts(zoo.text("gemma3_text"))
    other.model_info = replace(other.model_info, digests=parts.model_info.digests)
    assert parts.fingerprint() != other.fingerprint()
