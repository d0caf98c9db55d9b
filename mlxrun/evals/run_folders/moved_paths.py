"""Finds what a run's config names by path after the run has moved: to another folder or another machine.

A path is looked for at its old place relative to the job, then where it was, then beside the job by its name.
What is found is compared with the recorded digests later, so that another file of this name is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.config.settings import Config


def find_moved_paths(config: Config, manifest: Mapping[str, Any], folder: Path) -> Config:
    """Return the config of a run with the paths of today: of the model and what belongs to it, and of images.
    `folder`: where the job is now. Other paths, and names of the hub, stay as they are."""
    recorded = Path(manifest["input"]["path"]).parent

    def find(path: str) -> str:
        return find_moved(path, recorded, folder)

    model = config.model
    found = {name: getattr(model, name) for name in ("path", "draft", "adapter", "chat_template")}
    moved: dict[str, Any] = {name: find(path) for name, path in found.items() if path is not None}
    moved["adapters"] = {name: find(path) for name, path in model.adapters.items()}
    roots = tuple(find(root) for root in config.media.roots)
    user = config.batch.user_model
    batch = config.batch if user is None else replace(config.batch, user_model=find(user))
    media = replace(config.media, roots=roots)
    return replace(config, model=replace(model, **moved), media=media, batch=batch)


def find_moved(path: str, recorded: Path, folder: Path) -> str:
    """Return where an absolute path is now, or the path itself. `recorded`: the folder of the job in the run,
    `folder`: the one of today."""
    if not os.path.isabs(path):
        return path
    moved = os.path.normpath(folder.absolute() / os.path.relpath(path, recorded))
    places = (moved, path, str(folder.absolute() / Path(path).name))
    return next((each for each in places if os.path.exists(each)), path)
