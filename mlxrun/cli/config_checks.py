"""Checks of a config that need other packages: names of parsers, the syntax of the chat template.

Each check returns problems with key and position, as config/loading.py does. It imports nothing heavy, and
nothing at all if the config does not set the value.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlxrun.core.errors import ConfigError

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.nodes import ConfigProblem


def check_parsers(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Find names of parsers that do not exist."""
    from mlxrun.config.nodes import ConfigProblem

    given = loaded.config.parsers
    if given.tools in ("auto", "none") and given.reasoning in ("auto", "none"):
        return []
    from mlxrun.api.parsers.registry import choose_formats

    found = []
    for key, names in (("tools", (given.tools, "none")), ("reasoning", ("none", given.reasoning))):
        try:
            choose_formats(None, (), *names)
        except ConfigError as error:
            path = f"parsers.{key}"
            found.append(ConfigProblem.at(loaded.origins[path], path, str(error)))
    return found


def check_chat_template(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Find a chat template that cannot be read, or is not valid Jinja."""
    from mlxrun.config.nodes import ConfigProblem

    key, given = "model.chat_template", loaded.config.model.chat_template
    if given is None:
        return []
    from mlxrun.api.text.templates.template import find_syntax_error
    from mlxrun.core.text_files import read_text_file

    try:
        broken = find_syntax_error(read_text_file(Path(given)))
    except OSError as error:
        return [ConfigProblem.at(loaded.origins[key], key, f"{given}: {error.strerror}")]
    except UnicodeDecodeError as error:
        return [ConfigProblem.at(loaded.origins[key], key, f"{given}: it is not UTF-8 text: {error.reason}")]
    if broken is None:
        return []
    line, reason = broken
    return [ConfigProblem.at(loaded.origins[key], key, f"{given}:{line}: {reason}")]
