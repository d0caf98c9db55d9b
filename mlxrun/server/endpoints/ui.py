"""/ui, the page for people: chat, live requests, memory, and batches.

The files in `assets` are served as they are. The page has no secrets, so it needs no API key; it asks its
user for one when an API answers 401.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib import resources
from types import MappingProxyType

from aiohttp import web

from mlxrun.server.http.surface import UI_PATH, Endpoint, Surface

# Nothing but the page's own files and this server. Trusted types make assignments of HTML errors, so that no
# text of a model can become an element.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_TYPES = MappingProxyType(
    {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
)
_PAGE = "index.html"


@cache
def read_assets() -> dict[str, bytes]:
    """Read the files of the page, by name."""
    folder = resources.files("mlxrun.server.endpoints").joinpath("assets")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def get_asset(request: web.Request) -> web.StreamResponse:
    """Send a file of the page; 304 if the browser has this version."""
    name = request.path.removeprefix(UI_PATH).strip("/") or _PAGE
    body, mime = read_assets()[name], _TYPES[name.rpartition(".")[2]]
    return send_page(request, body, mime, _POLICY, sha256(body).hexdigest()[:32])


def send_page(request: web.Request, body: bytes, mime: str, policy: str, etag: str) -> web.StreamResponse:
    """Send a page or a file of one with its Content-Security-Policy; 304 if the browser has this version."""
    response = web.Response(body=body, content_type=mime, charset="utf-8")
    response.headers["Content-Security-Policy"] = policy
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Cache-Control"] = "no-cache"  # a browser asks each time whether it has changed
    response.etag = etag
    if any(each.value == etag for each in request.if_none_match or ()):
        response.body = None
        response.set_status(304)
    return response


SURFACE = Surface(
    "ui",
    (
        Endpoint("GET", UI_PATH, get_asset, "The page for people", public=True, engine=False),
        *(
            Endpoint("GET", f"{UI_PATH}/{name}", get_asset, "A file of the page", public=True, engine=False)
            for name in sorted(read_assets())
            if name != _PAGE
        ),
    ),
    is_api=False,
)
