"""What handlers and log lines need of every request: the server's config, and the id of the request."""

from __future__ import annotations

import re
import secrets
from collections.abc import Set

from aiohttp import web

from mlxrun.config.settings import Config

CONFIG = web.AppKey("config", Config)
CONFIG_HASH = web.AppKey("config_hash", str)
ID_HEADER = "x-request-id"
_ID = web.RequestKey("id", str)
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ACTIVE_IDS = web.AppKey("active_ids", set[str])  # of all requests that are being answered


def request_id(request: web.BaseRequest, taken: Set[str] = frozenset()) -> str:
    """The id of a request. The first call chooses it: the client's own if it is valid and not in `taken`,
    else a new one."""
    if _ID not in request:
        wanted = request.headers.get(ID_HEADER, "")
        usable = _VALID_ID.fullmatch(wanted) is not None and wanted not in taken
        request[_ID] = wanted if usable else f"req_{secrets.token_hex(12)}"
    return request[_ID]
