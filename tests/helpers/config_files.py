"""Configs of tests: a file is written into the working directory and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxrun.config.loading import LoadedConfig, load_config
from mlxrun.core.errors import ConfigError


def load(text: str, sets: Sequence[str] = (), **environ: str) -> LoadedConfig:
    """Return the config of a file `a.yaml` with this text."""
    Path("a.yaml").write_text(text)
    return load_config(Path("a.yaml"), sets, environ)


def load_errors(text: str, sets: Sequence[str] = (), **environ: str) -> list[str]:
    """Return the lines of the error that this file raises."""
    with pytest.raises(ConfigError) as caught:
        load(text, sets, **environ)
    return str(caught.value).splitlines()
