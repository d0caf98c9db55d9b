"""Where a server keeps its files, batches and stored responses, if the config does not say.

The first server on a machine takes mlxrun's own folder, which notes its port. A server on another port has a
folder of its own below that. So each finds what it had, in whatever order they start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mlxrun.config.settings import ServerSettings
from mlxrun.core.cache_home import expand_home, find_home


def find_data_folder(environ: Mapping[str, str]) -> Path:
    """mlxrun's folder in XDG_DATA_HOME, else in ~/.local/share. ConfigError if the home folder is unknown."""
    base = environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else find_home() / ".local" / "share") / "mlxrun"


def claim_data_folder(settings: ServerSettings, environ: Mapping[str, str]) -> Path:
    """The folder of the server with these settings, which is noted as its own."""
    if settings.data_path is not None:
        return expand_home(settings.data_path)
    folder = find_data_folder(environ)
    return folder if _claim(folder / "port", settings.port) else folder / f"port-{settings.port}"


def _claim(note: Path, port: int) -> bool:
    """Whether the folder of the note belongs to this port, as it does if nobody has claimed it."""
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with note.open("x", encoding="ascii") as file:
            file.write(f"{port}\n")
        return True
    except FileExistsError:
        return _read_port(note) in (port, None)
    except OSError:  # whoever uses the folder says why it cannot be used
        return True


def _read_port(note: Path) -> int | None:
    try:
        return int(note.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
