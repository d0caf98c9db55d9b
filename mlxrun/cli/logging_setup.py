"""Logging of the command line: to standard error, as text or as JSON lines.

Handlers are set here only; libraries get a handler through the root logger.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from mlxrun.core.visible_text import JsonFormatter, TextFormatter

if TYPE_CHECKING:
    from mlxrun.config.settings import LogSettings


def set_up_logging(settings: LogSettings) -> None:
    """Log mlxrun from `settings.level` on, and warnings of other libraries, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mlxrun").setLevel(settings.level.upper())
    logging.captureWarnings(True)
