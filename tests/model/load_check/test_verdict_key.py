"""Each thing that the load check's result depends on changes the key."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlxrun
from mlxrun.config.setting_fields import list_fields
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.model.load import model_digests
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check import verdict_key
from mlxrun.model.load_check.verdict_key import compute_key, describe_settings, list_variables
from mlxrun.model.machine.blas import find_loaded_blas, hold_blas_threads
from mlxrun.model.machine.device import resolve_config
from tests.helpers import engine_driver
from tests.helpers.lora_adapters import make_adapter
from tests.helpers.model_fixtures import Zoo

Patch = pytest.MonkeyPatch
SECTIONS = ("model", "engine", "scheduler", "cache", "prefill", "speculation")
PLACES = (
    "model.path",
    "model.names",
    "cache.disk_path",
    "cache.intervals_only",
    "engine.load_check",
    "scheduler.memory_limit",
)


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.text("llama"), tmp_path / "model"))


def make_key(folder: Path, **options: Any) -> str:
    config = resolve_config(engine_driver.make_config(folder, **options))
    found = compute_key(config, load_model_info(config.model, weights=True))
    assert found is not None
    return found


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_the_same_model_has_the_same_key_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert make_key(folder) == make_key(folder) == make_key(other, names=("a",), load_check="always")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_each_file_counts(folder: Path, name: str) -> None:
    before = make_key(folder)
    if name == "model.safetensors":
        flip_byte(folder / name, -1)
    else:
        (folder / name).write_text((folder / name).read_text() + " ")
    assert make_key(folder) != before


def test_each_byte_of_a_large_file_counts(folder: Path, monkeypatch: Patch) -> None:
    """Of those, a manifest's digest reads blocks only."""
    monkeypatch.setattr(model_digests, "_FULL_HASH_BYTES", 100)
    monkeypatch.setattr(model_digests, "_SAMPLES", 2)
    monkeypatch.setattr(model_digests, "_BLOCK", 16)
    monkeypatch.setattr(model_digests, "_PART", 1000)
    path = folder / "model.safetensors"
    settings, size = ModelSettings(str(folder)), path.stat().st_size
    before, named = make_key(folder), load_model_info(settings, weights=True).digests["model"]
    for place in (size // 2, size - 100):
        flip_byte(path, place)
        after = make_key(folder)
        assert load_model_info(settings, weights=True).digests["model"] == named
        assert after != before
        flip_byte(path, place)
    assert make_key(folder) == before


def test_a_template_counts(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "x.jinja"
    keys = set()
    for text in ("{{ 1 }}", "{{ 2 }}"):
        template.write_text(text)
        keys.add(make_key(folder, chat_template=str(template)))
    assert len(keys) == 2


# -- code, libraries, device --------------------------------------------------------------------------------


def change_libraries(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(verdict_key, "list_library_versions", lambda: {"mlx": "0.0.0"})


def change_files_of_a_library(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "own_library").mkdir()
    (tmp_path / "own_library" / "__init__.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(verdict_key, "_LIBRARIES", ("mlx", "mlx_lm", "mlx_vlm", "own_library"))


def change_source(monkeypatch: Patch, tmp_path: Path) -> None:
    root = tmp_path / "mlxrun"
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(Path(mlxrun.__file__).parent, root, ignore=ignored)
    verdict_key.digest_source.cache_clear()
    monkeypatch.setattr(mlxrun, "__file__", str(root / "__init__.py"))
    digests = {verdict_key.digest_source()}
    for changed in ("hooks/attention.py", "kernels/turn.h"):
        verdict_key.digest_source.cache_clear()
        with (root / "model" / changed).open("a") as file:
            file.write("\n")
        digests.add(verdict_key.digest_source())
    assert len(digests) == 3


def change_fact(name: str, value: Any) -> Callable[[Patch, Path], None]:
    def change(monkeypatch: Patch, tmp_path: Path) -> None:
        real = verdict_key.describe_device
        monkeypatch.setattr(verdict_key, "describe_device", lambda settings: real(settings) | {name: value})

    return change


def change_system(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.platform", lambda: "another system")


def change_compiler(monkeypatch: Patch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("")
    monkeypatch.setattr(verdict_key.shutil, "which", lambda name: str(compiler))


def change_format(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(verdict_key, "FORMAT", verdict_key.FORMAT + 1)


def change_cuda(monkeypatch: Patch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("580.1")
    monkeypatch.setattr(verdict_key, "uses_cuda", lambda: True)
    monkeypatch.setattr(verdict_key, "_DRIVER", driver)


CHANGES: dict[str, Callable[[Patch, Path], None]] = {
    "version of a library": change_libraries,
    "file of a library": change_files_of_a_library,
    "source": change_source,
    "device": change_fact("name", "another processor"),
    "backend": change_fact("backend", "metal"),
    "BLAS": change_fact("blas_version", "0.0.0"),
    "threads": change_fact("blas_threads", 99),
    "memory": change_fact("memory_size", 1),
    "system": change_system,
    "compiler": change_compiler,
    "format": change_format,
    "driver": change_cuda,
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_libraries_and_device_count(zoo: Zoo, name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    before = make_key(zoo.text("llama"))
    try:
        with monkeypatch.context() as inner:
            CHANGES[name](inner, tmp_path)
            changed = make_key(zoo.text("llama"))
    finally:
        verdict_key.digest_source.cache_clear()
    assert changed != before
    assert make_key(zoo.text("llama")) == before


def test_free_memory_does_not_count(zoo: Zoo, monkeypatch: Patch, tmp_path: Path) -> None:
    before = make_key(zoo.text("llama"))
    change_fact("free_memory", 5)(monkeypatch, tmp_path)
    assert make_key(zoo.text("llama")) == before


@pytest.mark.skipif(find_loaded_blas() is None, reason="counts OpenBLAS's own threads")
def test_the_threads_in_use_count(zoo: Zoo) -> None:
    keys = set()
    for threads in (1, 2):
        with hold_blas_threads(threads):
            keys.add(make_key(zoo.text("llama")))
    assert len(keys) == 2


# -- environment and settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("MLX_ENABLE_TF32", "METAL_DEBUG_ERROR_MODE", "MTL_SHADER_VALIDATION", "CUDA_VISIBLE_DEVICES"),
        *("CUBLAS_WORKSPACE_CONFIG", "CUDNN_LOGDEST_DBG", "NVIDIA_TF32_OVERRIDE", "OPENBLAS_CORETYPE"),
        *("GOTO_NUM_THREADS", "BLIS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
        *("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES"),
        *("GLIBC_TUNABLES", "NCCL_ALGO"),
    ],
)
def test_variables_by_which_libraries_compute_count(zoo: Zoo, name: str, monkeypatch: Patch) -> None:
    before = make_key(zoo.text("llama"))
    monkeypatch.setenv(name, "7")
    assert make_key(zoo.text("llama")) != before


def test_other_variables_do_not_count() -> None:
    assert list_variables({"HOME": "/x", "COLUMNS": "80", "OMP_WAIT_POLICY": "a"}) == {"OMP_WAIT_POLICY": "a"}


@pytest.mark.parametrize("path", [p for p, info in list_fields().items() if info.section in SECTIONS])
def test_each_setting_counts(path: str) -> None:
    """All of the engine's sections, except where files are and what they are called."""
    section, key = path.split(".")
    config = Config()
    changed = replace(config, **{section: replace(getattr(config, section), **{key: "another value"})})
    assert (describe_settings(changed) == describe_settings(config)) is (path in PLACES)


def test_settings_are_in_the_key(zoo: Zoo) -> None:
    keys = [make_key(zoo.text("llama"), **more) for more in ({}, {"reproducible": True}, {"chunk": 32})]
    assert len(set(keys)) == 3


def test_adapters_count(zoo: Zoo, tmp_path: Path) -> None:
    """By their content, in the same place."""
    folder, keys = zoo.text("llama"), set()
    for seed in (1, 2):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        adapter = str(make_adapter(folder, tmp_path / "x", seed))
        keys |= {make_key(folder, adapters={"x": adapter}), make_key(folder, adapter=adapter)}
    assert len(keys) == 4
