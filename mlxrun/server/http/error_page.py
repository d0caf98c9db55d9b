"""The page that a browser gets in place of an error in JSON. It has no script, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from http import HTTPStatus

from aiohttp import web

from mlxrun.core.visible_text import make_line

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:15vh auto;padding:0 1rem;"
    "overflow-wrap:anywhere}"
)
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; frame-ancestors 'none'"


def make_error_page(
    status: int, message: str, headers: Mapping[str, str], link: tuple[str, str] | None = None
) -> web.Response:
    """Make the page of an error. `link`: an address and its text."""
    name = f"{status} {HTTPStatus(status).phrase}"
    more = "" if link is None else f'<p><a href="{escape(link[0])}">{escape(link[1])}</a></p>'
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style>"
        f"<h1>{name}</h1><p>{escape(make_line(message))}</p>{more}</html>\n"
    )
    own = {**headers, "Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    body = text.encode("utf-8", "replace")
    return web.Response(body=body, status=status, headers=own, content_type="text/html", charset="utf-8")
