"""Where the files of the disk tier are (engine/prefix_cache/cache_folder.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.engine.prefix_cache.cache_folder import check_folder, get_default_folder, resolve_cache_folder


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert get_default_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/mlxrun/prefixes")
    assert resolve_cache_folder("~/mine") == tmp_path / "mine"
    with pytest.raises(ConfigError, match="cache.disk_path: ~nobody-here/x: the home folder is unknown"):
        resolve_cache_folder("~nobody-here/x")


def test_a_folder_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    check_folder(tmp_path / "a/b")
    assert list((tmp_path / "a/b").iterdir()) == []
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file/x"):
        with pytest.raises(
            ConfigError, match=r"cache\.disk_path: .*file.* cannot be written to: .*; give a folder"
        ):
            check_folder(bad)
