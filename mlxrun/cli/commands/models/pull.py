"""`mlxrun pull`: downloads a model, and says before what it is and how large."""

from __future__ import annotations

import shutil

import click

from mlxrun.cli.commands.models.show import find_family_result
from mlxrun.cli.options import find_model, say, set_up_logging
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.core.terminal import print_line


@click.command(
    epilog="""\b
Examples:
  mlxrun pull qwen3-8b-4bit                 mlx-community/Qwen3-8B-4bit
  mlxrun pull Qwen/Qwen3-0.6B --revision main
  mlxrun serve qwen3-8b-4bit                downloads too, if it must

\b
A download that was interrupted goes on where it stopped. Files go to the cache of the hub's own programs:
$HF_HUB_CACHE, else ~/.cache/huggingface/hub. For models that ask for an agreement: hf auth login.
"""
)
@click.argument("model", metavar="MODEL")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit; by default the newest one.")
def command(model: str, revision: str | None) -> None:
    """Download a model from the hub, and say first what it is."""
    from mlxrun.config.settings import LogSettings, ModelSettings
    from mlxrun.model.load.hub import is_hub_id, look_up
    from mlxrun.model.load.model_files import find_model_folder, read_json

    set_up_logging(LogSettings(level="warning"))
    hub_id = find_model(model)
    if not is_hub_id(hub_id):
        raise ConfigError(f"{model} is not a model of the hub, such as mlx-community/Qwen3-0.6B-4bit")
    found = look_up(hub_id, revision)
    folder = find_model_folder(ModelSettings(path=hub_id, revision=revision), weights=False)
    config = read_json(folder / "config.json")
    family, kind = str(config.get("model_type")), "vision" if config.get("vision_config") else "text"
    licence = found.licence or "none is named"
    say(f"{found.id}: {family}, {find_family_result(family, kind)}; licence: {licence}")
    free = shutil.disk_usage(folder).free
    if found.missing > free:
        needed, left = format_rounded(found.missing), format_rounded(free)
        raise ModelLoadError(f"{found.id}: {needed} are missing, and the disk has {left}")
    say(f"{format_rounded(found.missing)} of {format_rounded(found.size)} are downloaded")
    find_model_folder(ModelSettings(path=hub_id, revision=revision))
    print_line(f"{found.id} is here; `mlxrun serve {hub_id}` serves it")
