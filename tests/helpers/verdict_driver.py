"""Starts engines that keep the verdict of the load check, and counts how often models are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core import cache_home
from mlxrun.engine.engine import Engine
from mlxrun.model import model_loading
from mlxrun.model.load_check.report import LoadCheckReport
from tests.helpers import engine_driver


class KeptVerdicts:
    """A folder of verdicts. `compared`: how often a model was."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "mlxrun" / "load-checks"
        self.compared = 0
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(cache_home, "KEPT_DAYS", 7.0)
        self._choose: Callable[..., LoadCheckReport] = model_loading.choose_methods
        monkeypatch.setattr(model_loading, "choose_methods", self._count)

    def _count(self, *given: Any) -> LoadCheckReport:
        self.compared += 1
        return self._choose(*given)

    def start(self, folder: Path, **options: Any) -> Engine:
        """An engine; `options` as of engine_driver.make_config."""
        return engine_driver.make_real_engine(folder, **options)

    def list_files(self) -> list[Path]:
        return sorted(self.folder.glob("*")) if self.folder.is_dir() else []


def get_report(engine: Engine) -> LoadCheckReport:
    assert engine.load_check is not None
    return engine.load_check
