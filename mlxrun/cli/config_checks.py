"""What config files get wrong that only other packages know: names of parsers, syntax of the chat template.

Each check gives problems as config.loader does, with key and place; nothing heavy is imported, and nothing at
all where the config leaves the value alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlxrun.errors import ConfigError

if TYPE_CHECKING:
    from mlxrun.config.loading import Loaded
    from mlxrun.config.nodes import ConfigProblem


def parser_problems(loaded: Loaded) -> list[ConfigProblem]:
    """Names of parsers that do not exist."""
    from mlxrun.config.nodes import problem

    given = loaded.config.parsers
    if given.tools in ("auto", "none") and given.reasoning in ("auto", "none"):
        return []
    from mlxrun.parsers.registry import choose_formats

    found = []
    for key, names in (("tools", (given.tools, "none")), ("reasoning", ("none", given.reasoning))):
        try:
            choose_formats(None, (), *names)
        except ConfigError as error:
            path = f"parsers.{key}"
            found.append(problem(loaded.origins[path], path, str(error)))
    return found


def template_problems(loaded: Loaded) -> list[ConfigProblem]:
    """A chat template that cannot be read, or that jinja does not understand."""
    from mlxrun.config.nodes import problem

    key, given = "model.chat_template", loaded.config.model.chat_template
    if given is None:
        return []
    from mlxrun.text.template import find_syntax_error

    try:
        broken = find_syntax_error(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        return [problem(loaded.origins[key], key, f"{given}: {error.strerror}")]
    except UnicodeDecodeError as error:
        return [problem(loaded.origins[key], key, f"{given}: is no UTF-8 text: {error.reason}")]
    if broken is None:
        return []
    line, reason = broken
    return [problem(loaded.origins[key], key, f"{given}:{line}: {reason}")]
