"""Tiny models whose decoding from pages is verified at load with the emulated kernel, as on a Mac.

An emulated kernel computes when it is called, so it cannot be a part of a compiled forward: `decode compiled`
fails here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.model.kernels import kernel_source
from mlxrun.model.kv.paged import paged_batch
from mlxrun.model.load_check import choose, text_ladder
from mlxrun.model.load_check.attention_checks import KernelCheck
from tests.helpers import text_models
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.metal.emulator.emulated_kernel import Emulator

# The kernel covers values of 32 numbers and more.
SIZES = {
    "llama": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "gpt_oss": {"head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 64},
}


@pytest.fixture
def gpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Loading believes in a GPU. Times are not compared: those of an emulator say nothing."""
    for module in (choose, text_ladder, paged_batch):
        monkeypatch.setattr(module, "uses_gpu", lambda: True)
    monkeypatch.setattr(text_ladder, "KernelCheck", lambda timed: KernelCheck(timed=False))
    monkeypatch.setattr(text_ladder, "get_backend", lambda: "metal")
    return emulator


def build(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(text_models.CONFIGS, family, text_models.CONFIGS[family] | SIZES[family])
    return Zoo(folder).text(family)


@pytest.mark.parametrize("family", mark_sweep(SIZES, ("llama",)))
def test_a_family_decodes_by_the_kernel(
    family: str, gpu: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = probe_model(build(family, tmp_path, monkeypatch))
    assert list_failed(report) == ["decode compiled"] and report.methods.decode == "paged"
    assert any(check.name == "decode paged" for check in report.checks)
    assert {launch.name.rsplit("_", 1)[0] for launch in gpu.launches} == {"paged_split", "paged_join"}


def test_a_wrong_kernel_is_found_at_load(
    gpu: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = kernel_source.SPLIT.replace("token < stop;", "token < stop - 1;")
    monkeypatch.setattr(kernel_source, "SPLIT", wrong)
    report = probe_model(build("llama", tmp_path, monkeypatch))
    assert list_failed(report) == ["decode paged"] and report.methods.decode == "ragged"
