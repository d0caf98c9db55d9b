"""Takes out the first line of Claude Code's system prompt, whose `cch` differs in each request."""

from __future__ import annotations

import functools
import logging
import re

logger = logging.getLogger(__name__)

_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n\s*|\Z)", re.IGNORECASE)


def strip_billing_header(text: str) -> str:
    """The text without a billing line at its beginning."""
    found = _BILLING.match(text)
    if found is None:
        return text
    _log_stripped()
    return text[found.end() :]


@functools.cache
def _log_stripped() -> None:
    """Cached, so that it is logged once."""
    logger.info(
        "removed x-anthropic-billing-header from a system prompt: it differs in each request, so the prefix "
        "cache would never match (server.strip_billing_header)"
    )
