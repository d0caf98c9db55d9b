"""`python -m benchmarks install`, without an installation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import install
from mlxrun.core.errors import MlxrunError


def test_what_came_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files and packages of the environment before are left out."""
    calls: list[str] = []

    def call(command: list[str], folder: Path) -> float:
        calls.append(" ".join(command[1:]))
        if "venv" in command:
            (tmp_path / "text").mkdir()
            (tmp_path / "text" / "pip.py").write_bytes(b"12345")
        elif "install" in command:
            (tmp_path / "text" / "new.py").write_bytes(b"1234567")
        return 1.234

    async def serve(program: str, folder: Path) -> float:
        return 2.0

    packages = iter(({"pip": "1"}, {"pip": "1", "mlx": "2", "mlxrun": "3"}))
    monkeypatch.setattr(install, "run_program", call)
    monkeypatch.setattr(install, "list_packages", lambda python, folder: next(packages))
    monkeypatch.setattr(install, "measure_server", serve)
    monkeypatch.setattr(install, "build_wheel", lambda source, folder: Path("a.whl"))
    monkeypatch.setattr("tempfile.TemporaryDirectory.__enter__", lambda self: str(tmp_path))
    report = install.run_install_bench(["text"], lambda text: None)
    found = report["kinds"]["text"]
    assert found["bytes"] == 7 and found["packages"] == {"mlx": "2", "mlxrun": "3"}
    times = [found[name] for name in install.TIMES]
    assert times[0] == 1.23 and times[2:] == [1.23, 1.23, 2.0] and sum("a.whl" in each for each in calls) == 1
    assert report["command"] == "python -m benchmarks install --kind text --json FILE"
    install.print_install_report(report)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1" * 1000)
    before = install.count_bytes(tmp_path)
    (tmp_path / "b").symlink_to("a")
    assert before == 1000 and install.count_bytes(tmp_path) < 1100


def test_a_failed_command_is_shown(tmp_path: Path) -> None:
    with pytest.raises(MlxrunError, match=r"-c import nothing_there` failed: (?s:.*)ModuleNotFoundError"):
        install.run_program([sys.executable, "-c", "import nothing_there"], tmp_path)
