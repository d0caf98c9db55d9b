"""What tests of several commands need."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.config.settings import Config
from mlxrun.core.errors import ModelLoadError
from tests.helpers.batch_fakes import FakeClient
from tests.helpers.tokenizers import FakeModelInfo


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    """Replaces model and engine, and has a data folder of its own; returns the configs that the engine was
    started with."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
    started: list[Config] = []

    async def start(config: Any, host: Any) -> FakeClient:
        started.append(config)
        if config.model.path == "org/broken":
            raise ModelLoadError("model.path: broken")
        return FakeClient(FakeModelInfo())

    # The engine and the fit first: they keep the real function, whichever test of a process is the first.
    import mlxrun.model.fit.verdict  # noqa: F401

    monkeypatch.setattr("mlxrun.engine.client.EngineClient.start", start)
    monkeypatch.setattr(
        "mlxrun.model.load.model_info.load_model_info", lambda settings, **_: FakeModelInfo(vision=True)
    )
    return started
