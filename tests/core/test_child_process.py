"""A child is a module of this package, whatever lies in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import mlxrun
from mlxrun.core.child_process import start_module


def test_files_of_the_working_directory_are_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mlxrun", "click"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the folder')")
    for module in ("json", "click"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('of the folder')")
    with start_module("mlxrun.cli.main", "--version", stdout=subprocess.PIPE) as process:
        out = process.communicate()[0]
    assert process.returncode == 0 and out.startswith(b"mlxrun")


def test_the_environment_and_options_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "a")
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: (command, options))
    command, options = cast(Any, start_module("m", 1, "x", environment={"OWN": "b"}, stdin=3))
    assert command == [sys.executable, "-P", "-m", "m", "1", "x"]
    assert options["stdin"] == 3 and (options["env"]["KEPT"], options["env"]["OWN"]) == ("a", "b")
    assert options["env"]["PYTHONPATH"] == f"{Path(mlxrun.__file__).parents[1]}{os.pathsep}/elsewhere"
