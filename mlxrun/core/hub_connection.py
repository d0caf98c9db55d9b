"""Whether the Hugging Face hub can be reached, before its library is asked for anything.

Without a network that library repeats some requests for half a minute, and longer where nobody answers. A
download that has begun is left to the library, which repeats and resumes it.
"""

from __future__ import annotations

import logging

REACH_SECONDS = 3.0  # for a connection, and for the first byte of the answer


def check_hub() -> None:
    """Send the hub one request. What the library raises if there is no answer, `is_unreachable` knows. From
    then on the library's warnings are shown once, by the handler of mlxrun."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    logging.getLogger("huggingface_hub").handlers.clear()
    get_session().head(constants.ENDPOINT, timeout=REACH_SECONDS)


def is_unreachable(error: Exception) -> bool:
    """Whether an error of the hub's library says that the hub did not answer, or may not be asked."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError):
        return True
    return type(error).__module__.startswith(("httpx", "httpcore"))


def is_hub_reachable() -> bool:
    """Whether the hub answers a request."""
    try:
        check_hub()
    except Exception as error:
        if not is_unreachable(error):
            raise
        return False
    return True
