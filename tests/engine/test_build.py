"""An engine is built from a config, or refused with the reason before anything runs."""

from __future__ import annotations

import ctypes
import json
import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from mlxrun.config.settings import (
    CacheSettings,
    Config,
    MediaSettings,
    ModelSettings,
    PrefillSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.engine import build
from mlxrun.engine.build import build_engine
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache
from mlxrun.model.load import model_digests
from mlxrun.model.load import model_info as model_info_module
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.machine import blas
from mlxrun.model.machine.device import uses_gpu
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.pooling_models import build_pooling_model


def test_weights_that_compute_nan(zoo: Zoo, tmp_path: Path) -> None:
    """A model that can only answer nonsense does not load."""
    folder = tmp_path / "damaged"
    shutil.copytree(zoo.text("llama"), folder)
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(ModelLoadError, match="NaN"):
        build_engine(Config(model=ModelSettings(path=str(folder))))


@pytest.mark.parametrize("limit", [1, 10_000])
def test_a_memory_limit_below_the_weights(zoo: Zoo, tmp_path: Path, limit: int) -> None:
    for folder in (zoo.text("llama"), build_pooling_model("bert", tmp_path / "bert")):
        config = Config(
            model=ModelSettings(path=str(folder)), scheduler=SchedulerSettings(memory_limit=limit)
        )
        with pytest.raises(ConfigError, match=r"scheduler\.memory_limit: weights .* no request can ever run"):
            build_engine(config)


def test_a_memory_limit_with_no_room_for_a_row(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    """The weights fit, and not even the shortest request beside them; a byte more, and that runs."""
    folder, options = zoo.text("llama"), {"load_check": False, "memory_headroom": 0.0}
    memory = engine_driver.make_real_engine(folder, **options).scheduler.limits.memory
    least = memory.compute_needed_bytes([2], 1)
    with pytest.raises(ConfigError, match=r"weights .* \+ 2 tokens .* > limit .*: no request can ever run"):
        engine_driver.make_real_engine(folder, memory_limit=least - 1, **options)
    with caplog.at_level(logging.WARNING):
        engine = engine_driver.make_real_engine(folder, memory_limit=least, **options)
    assert "a prompt and its answer fit in memory up to 2 tokens" in caplog.text
    received = engine_driver.make_text_request("a", [5], max_tokens=1)
    assert len(engine_driver.run_requests(engine, [received])["a"].tokens) == 1


def test_memory_for_images_is_named_where_it_does_not_fit(zoo: Zoo) -> None:
    model, media = ModelSettings(path=str(zoo.vision("qwen2_5_vl"))), MediaSettings(memory_bytes=10**18)
    with pytest.raises(ConfigError, match=r"weights \S+ kB \+ media\.memory_bytes 1000000\.0 TB \+"):
        build_engine(Config(model=model, media=media))
    cached = CacheSettings(image_bytes=10**18)
    with pytest.raises(ConfigError, match=r" \+ cache\.image_bytes 1000000\.0 TB \+ .* no request can ever"):
        build_engine(Config(model=model, cache=cached))


@pytest.mark.skipif(uses_gpu(), reason="has pages")
@pytest.mark.parametrize("method", ["ngram", "draft", "mtp"])
def test_drafts_on_a_cpu_are_refused_before_the_model_is_read(method: Any) -> None:
    config = Config(model=ModelSettings(path="/nowhere"), speculation=SpeculationSettings(method))
    said = (
        rf"speculation\.method: {method} cannot be used: .* for GPUs, .*; set speculation\.method to auto or"
    )
    with pytest.raises(ConfigError, match=said):
        build_engine(config)


def test_a_bad_draft_is_found_before_weights_are_read(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its files: another vocabulary, no weights, an encoder."""
    monkeypatch.setattr(build, "load_model", lambda *given: pytest.fail("the model was loaded"))
    encoder = build_pooling_model("bert", tmp_path / "bert")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    for draft, said in (
        ("embedded", r"\S+ has another vocabulary: \d+ tokens differ"),
        (tmp_path / "bare", r"no \*\.safetensors in .*: the model has no weights"),
        (encoder, r"\S+bert cannot be loaded as a text model, since mlx-lm does not have"),
    ):
        settings = ModelSettings(path=str(zoo.text("llama")), draft=str(draft))
        with pytest.raises(ConfigError, match=rf"^model\.draft: {said}"):
            build_engine(Config(model=settings, prefill=PrefillSettings("draft")))


def test_a_model_that_sees_is_refused_before_its_draft_is_compared(zoo: Zoo) -> None:
    """Whose vocabulary is another one, which would be mended in vain."""
    settings = ModelSettings(path="embedded", draft=str(zoo.text("llama")))
    with pytest.raises(ConfigError, match=r"^prefill\.sparse: is not possible .* vision-language model"):
        build_engine(Config(model=settings, prefill=PrefillSettings("draft")))


def test_sparse_prompts_must_fit_both_models(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose contexts are known from their files; a prompt of a model leaves room for an answer."""
    loaded = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(build, "load_model", loaded)
    long, short = zoo.text("llama"), tmp_path / "short"
    shutil.copytree(long, short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 1000}
    (short / "config.json").write_text(json.dumps(config))

    def try_to_build(model: Path, draft: Path, least: int) -> None:
        settings = ModelSettings(path=str(model), draft=str(draft))
        build_engine(Config(model=settings, prefill=PrefillSettings("draft", 0.5, least)))

    said = r"prefill\.sparse_min_tokens: 100\d is longer than all prompts"
    with pytest.raises(ConfigError, match=rf"{said}: the context of short is 1000"):
        try_to_build(short, long, 1000)
    with pytest.raises(ConfigError, match=rf"{said} that model\.draft takes: its context is 1000"):
        try_to_build(long, short, 1001)
    for model, draft, least in ((short, long, 999), (long, short, 1000)):
        with pytest.raises(InterruptedError):
            try_to_build(model, draft, least)


@pytest.mark.parametrize("sparse", ["off", "draft"])
def test_the_files_of_a_draft_model_are_read_once_and_only_if_it_is_used(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sparse: Any
) -> None:
    """Those for its digest only where somebody asks for that. A CPU drafts nothing."""
    caplog.set_level(logging.INFO)
    folder, draft, read = str(zoo.text("llama")), str(zoo.text("qwen3")), list[str]()
    for module, name in ((model_info_module, "load_tokenizer"), (model_digests, "compute_digests")):
        real = getattr(module, name)

        def count(path: Path, *given: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            read.extend([name] * (path == Path(draft)))
            return real(path, *given, **more)

        monkeypatch.setattr(module, name, count)
    model, speculation = ModelSettings(path=folder, draft=draft), SpeculationSettings("auto")
    info = build_engine(
        Config(model=model, prefill=PrefillSettings(sparse, 0.5, 256), speculation=speculation)
    ).model_info
    is_used = sparse == "draft" or uses_gpu()
    assert read == ["load_tokenizer"] * is_used
    assert re.findall(r"loading \S+ from (\S+),", caplog.text) == [folder, *[draft] * is_used]
    read.clear()
    assert info.digests["draft"] == info.digests["draft"] and read == ["compute_digests"]


def test_a_model_that_is_loaded_is_not_read_again(zoo: Zoo) -> None:
    """The front end reads it first, as it needs the tokenizer."""
    config = engine_driver.make_config(zoo.text("llama"))
    model_info = load_model_info(config.model, weights=True)
    assert build_engine(config, model_info).model_info is model_info


def test_the_parts_share_the_settings(zoo: Zoo) -> None:
    """The scheduler's limits are the model's context and the memory; the cache is the engine's."""
    folder = zoo.text("llama")
    engine = engine_driver.make_real_engine(folder, backend="none", memory_limit=500_000_000)
    assert isinstance(engine.prefix_cache, NoPrefixCache) and not engine.busy
    assert engine.scheduler.limits.context == engine.model_info.context_length
    memory = engine.scheduler.limits.memory
    assert 0 < memory.weights < memory.limit <= 500_000_000 and memory.footprint.per_token > 0
    assert engine.load_check is not None
    unprobed = engine_driver.make_real_engine(folder, load_check=False)
    assert unprobed.load_check is not None and unprobed.load_check.checks == ()


def test_a_reproducible_engine_has_aligned_chunks(zoo: Zoo) -> None:
    """However full the batch is: a short budget waits for a whole chunk."""
    (prompt,) = text_models.prompts(5, [40])
    engine = engine_driver.make_real_engine(zoo.text("llama"), reproducible=True, prefill_budget_busy=17)
    plans = []
    execute = engine_driver.get_runner(engine).execute
    engine_driver.get_runner(engine).execute = lambda plan: plans.append(plan) or execute(plan)
    requests = [engine_driver.make_text_request(name, prompt[i:]) for i, name in enumerate("ab")]
    engine_driver.run_requests(engine, requests)
    chunks = [(chunk.start, chunk.stop) for plan in plans for chunk in plan.prefill]
    assert {start % 16 for start, _ in chunks} == {0} and len(chunks) == 6


def test_a_reproducible_engine_holds_one_thread_until_it_is_closed(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it cannot be built. Another engine leaves the threads as they are."""
    if blas.find_loaded_blas() is None:
        pytest.skip("there is no OpenBLAS here")
    folder = zoo.text("llama")
    monkeypatch.setattr(blas, "_HELD", blas._HeldThreads())  # without engines that other tests have left
    with blas.hold_blas_threads(3):
        assert count_threads_beside(folder) == 3
        with pytest.raises(ConfigError, match="another engine of this process computes with 3"):
            count_threads_beside(folder, reproducible=True)
    before = count_threads()
    set_threads(before + 2)
    try:
        assert count_threads_beside(folder, reproducible=True) == 1
        assert count_threads() == before + 2
        monkeypatch.setattr(build, "load_model", Mock(side_effect=ModelLoadError("broken")))
        with pytest.raises(ModelLoadError):
            count_threads_beside(folder, reproducible=True)
        assert count_threads() == before + 2
    finally:
        set_threads(before)


def test_an_engine_leaves_cores_to_other_programs(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it loads and in each step, unless the config fixes the threads; not after it is closed."""
    if blas.find_loaded_blas() is None:
        pytest.skip("there is no OpenBLAS here")
    monkeypatch.setattr(blas, "_HELD", held := blas._HeldThreads())
    held.cores = cores = Mock(**{"count.return_value": 2})
    before = count_threads()
    set_threads(4)
    try:
        assert count_threads_beside(zoo.text("llama"), blas_threads=3) == 3
        assert count_threads_beside(zoo.text("llama"), reproducible=True) == 1
        assert not cores.count.called
        assert count_threads_beside(zoo.text("llama")) == 2
        assert count_threads() == 4

        def compute() -> list[int]:
            engine = engine_driver.make_real_engine(zoo.text("llama"))
            engine.add(engine_driver.make_text_request("a", [5, 6, 7]))
            counts = [count_threads()]
            for cores.count.return_value in (3, 1, None, 8):
                engine.step()
                counts.append(count_threads())
            engine.close()
            return counts

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(compute).result() == [2, 3, 1, 1, 4]
    finally:
        set_threads(before)


def count_threads_beside(folder: Path, **options: Any) -> int:
    """The threads of BLAS while an engine is there, on a thread of its own, as MLX wants it."""

    def count() -> int:
        engine = engine_driver.make_real_engine(folder, **options)
        try:
            return count_threads()
        finally:
            engine.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(count).result()


def count_threads() -> int:
    """Those of the next product."""
    return int(ctypes.CDLL(blas.find_loaded_blas()).openblas_get_num_threads())


def set_threads(count: int) -> None:
    """As the environment of a process would."""
    ctypes.CDLL(blas.find_loaded_blas()).openblas_set_num_threads(count)
