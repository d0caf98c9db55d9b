"""mlxrun's folder for what can be made again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxrun.core.cache_home import expand_home, find_cache_home, find_home
from mlxrun.core.errors import ConfigError


def test_the_folder_is_where_the_system_has_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert find_cache_home({"XDG_CACHE_HOME": "/x"}) == Path("/x/mlxrun")
    assert find_cache_home({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "mlxrun"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_cache_home({}) == tmp_path / "Library" / "Caches" / "mlxrun"


def test_an_unknown_home_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container for any user, who has no name."""

    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    monkeypatch.setattr(Path, "home", lambda: fail(Path("~")))
    with pytest.raises(ConfigError, match="^~/models/a: the home folder is unknown; give a full path$"):
        expand_home("~/models/a")
    with pytest.raises(ConfigError, match="^the home folder is unknown; set HOME$"):
        find_home()
