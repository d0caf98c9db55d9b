"""Runs a script of tests/evals/harnesses/scripts in the environment that has the evaluation harnesses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.helpers.command_processes import run_program

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients/harnesses/bin/python"
SCRIPTS = ROOT / "tests/evals/harnesses/scripts"


def run_harness_script(name: str, given: Any, folder: Path, timeout: float = 400) -> Any:
    """What a script prints as JSON in its last line. It gets `given` in a JSON file, and `folder` as its home
    and working directory."""
    assert PYTHON.exists(), "`make clients` installs the harnesses"
    path = folder / "given.json"
    path.write_text(json.dumps(given))
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("OPENAI", "INSPECT", "MLXRUN"))
    }
    own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = run_program([PYTHON, SCRIPTS / name, path], seconds=timeout, env=keep | own, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
