"""mlxrun's folder for what can be made again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxrun.core.cache_home import find_cache_home


def test_the_folder_is_where_the_system_has_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert find_cache_home({"XDG_CACHE_HOME": "/x"}) == Path("/x/mlxrun")
    assert find_cache_home({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "mlxrun"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_cache_home({}) == tmp_path / "Library" / "Caches" / "mlxrun"
