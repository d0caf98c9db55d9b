"""Reads a model's files, without its weights, in a process that ends if that hangs.

The engine's thread has the same watchdog for what comes later; this is before there is such a thread.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from mlxrun.core.terminal import print_error

if TYPE_CHECKING:
    from mlxrun.config.settings import ModelSettings
    from mlxrun.model.load.model_info import LoadedModelInfo

STUCK_EXIT = 3  # of an engine that cannot be used


def read_model(settings: ModelSettings, **options: Any) -> LoadedModelInfo:
    """What `load_model_info` returns, which has the options. A file system that answers no more would be
    waited for without end, and no exception ends that: the process does, and says where it was."""
    from mlxrun.engine.watchdog import watch
    from mlxrun.model.load.model_info import load_model_info

    with watch("reading the model's files", _end_process):
        return load_model_info(settings, **options)


def _end_process(problem: str) -> None:
    print_error(f"mlxrun: the model cannot be loaded: {problem}")
    sys.stderr.flush()
    os._exit(STUCK_EXIT)
