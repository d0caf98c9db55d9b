"""What is logged while a model is loaded: what and from where at once, then how far."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load import load_progress
from mlxrun.model.load.load_progress import LoadProgress, evaluate_parameters
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.load.model_info import load_model_info


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "mlxrun")
    return caplog


def test_a_line_every_few_seconds_and_none_at_the_end(log: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 2.5, 2.5, 4.0, 9.0])
    progress = LoadProgress("loading the weights of m", 4_000_000_000, lambda: next(times))
    for _ in range(4):
        progress.add(1_000_000_000)
    assert log.messages == ["loading the weights of m: 2.0 GB of 4.0 GB (50 %)"]


def test_weights_are_evaluated_in_groups(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in the order of the model, and none is changed."""
    import mlx.core as mx
    import mlx.nn as nn

    monkeypatch.setattr(load_progress, "GROUP_BYTES", 100)
    monkeypatch.setattr(load_progress, "REPORT_EVERY", 0.0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    real, groups = mx.eval, list[int]()

    def count(arrays: list[mx.array]) -> None:
        groups.append(sum(array.nbytes for array in arrays))
        real(arrays)

    monkeypatch.setattr(mx, "eval", count)
    evaluate_parameters(model, "m")
    assert sum(groups) == 5 * 80 and max(groups) <= 180 and len(groups) == 3
    assert log.messages[0].startswith("loading the weights of m: ") and log.messages[0].endswith("%)")


def test_the_model_and_its_folder_are_named_at_once(log: pytest.LogCaptureFixture) -> None:
    """Before the tokenizer is loaded, which takes seconds; not where no weights are to be loaded."""
    load_model_info(ModelSettings())
    load_model_info(ModelSettings(), weights=True, announce=False)
    assert log.messages == []
    seen: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mlxrun.model.load.model_info.load_tokenizer", lambda *_: seen.append(list(log.messages)) or 1 / 0
        )
        with pytest.raises(ModelLoadError, match="ZeroDivisionError"):
            load_model_info(ModelSettings(), weights=True)
    size = sum(path.stat().st_size for path in Path(EMBEDDED).glob("*.safetensors"))
    assert seen == [[f"loading embedded from {EMBEDDED}, {size / 1e6:.1f} MB of weights"]]
