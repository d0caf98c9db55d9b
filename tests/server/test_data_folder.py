"""Each server finds its own files and batches again, in whatever order servers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.config.settings import ServerSettings
from mlxrun.server.data_folder import claim_data_folder, find_data_folder


def claim(home: Path, port: int) -> Path:
    return claim_data_folder(ServerSettings(port=port), {"XDG_DATA_HOME": str(home)})


def test_the_default_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_data_folder({}) == tmp_path / ".local" / "share" / "mlxrun"
    assert find_data_folder({"XDG_DATA_HOME": "relative"}) == tmp_path / ".local" / "share" / "mlxrun"
    assert find_data_folder({"XDG_DATA_HOME": "/data"}) == Path("/data/mlxrun")


def test_a_folder_of_the_config_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ServerSettings(data_path="~/jobs")
    assert claim_data_folder(settings, {"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "jobs"
    assert list(tmp_path.iterdir()) == []


def test_each_port_keeps_its_folder(tmp_path: Path) -> None:
    first, second = claim(tmp_path, 8000), claim(tmp_path, 8001)
    assert first == tmp_path / "mlxrun" and second == first / "port-8001"
    assert (claim(tmp_path, 8001), claim(tmp_path, 8000)) == (second, first)


def test_the_first_server_takes_the_folder_that_is_there(tmp_path: Path) -> None:
    """Batches of a server that had no note of its port are found again."""
    (tmp_path / "mlxrun" / "batches").mkdir(parents=True)
    assert claim(tmp_path, 9000) == tmp_path / "mlxrun"
    assert claim(tmp_path, 8000) == tmp_path / "mlxrun" / "port-8000"


def test_a_damaged_note_hides_nothing(tmp_path: Path) -> None:
    claim(tmp_path, 8000)
    (tmp_path / "mlxrun" / "port").write_text("a")
    assert claim(tmp_path, 8001) == tmp_path / "mlxrun"


def test_a_folder_that_cannot_be_made_is_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlxrun").write_text("a file")
    assert claim(tmp_path, 8000) == tmp_path / "mlxrun"
