"""A command whose model is on a file system that answers no more ends with a sentence."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from mlxrun.cli.run_setup import read_model
from mlxrun.config.settings import ModelSettings
from mlxrun.engine import watchdog
from mlxrun.model.load import load_progress

# A load that takes long, with limits that are soon reached.
HANGS = """
import threading
from mlxrun.cli.run_setup import read_model
from mlxrun.config.settings import ModelSettings
from mlxrun.engine import watchdog
from mlxrun.model.load import load_progress, model_info

watchdog.TICK, watchdog.LIMIT = 0.01, 0.3
watchdog.read_used_seconds, watchdog.read_bytes = lambda: 0.0, lambda: 0

def load(settings, **options):
    with {around}:
        threading.Event().wait({seconds})
    return "loaded"

model_info.load_model_info = load
print(read_model(ModelSettings(), weights=True))
"""


def run(around: str, seconds: float) -> subprocess.CompletedProcess[str]:
    program = HANGS.format(around=around, seconds=seconds)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


def test_a_file_system_that_hangs_ends_the_process() -> None:
    done = run("threading.Lock()", 250)
    assert (done.returncode, done.stdout) == (3, "")
    said = "the model cannot be loaded: no progress for 0 seconds while reading the model's files (in wait"
    assert done.stderr.splitlines()[-1].startswith(f"mlxrun: {said}")
    assert "in load" in done.stderr, "the stack is logged"


def test_a_download_is_waited_for() -> None:
    """It may be slow for longer than the limit, on other threads than the one that is watched."""
    done = run("load_progress.note_download()", 2)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr


def test_downloads_are_counted_to_their_end() -> None:
    with pytest.raises(OSError), load_progress.note_download():
        assert load_progress.is_downloading()
        raise OSError
    assert not load_progress.is_downloading()


def test_the_watchdog_ends_with_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **options: options)
    monkeypatch.setattr(watchdog, "TICK", 0.01)
    before = set(threading.enumerate())
    assert read_model(ModelSettings(), weights=False) == {"weights": False}
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
