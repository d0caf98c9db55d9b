"""The encodings of bodies (`Content-Encoding`). aiohttp decodes those of ENCODINGS while a body arrives.

A body with another encoding is refused. aiohttp would hand it over undecoded, or refuse it before its path is
known.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.compression_utils import HAS_BROTLI, HAS_ZSTD
from aiohttp.http import HttpProcessingError, HttpRequestParser, RawRequestMessage

from mlxrun.core.errors import WrongContentEncoding
from mlxrun.core.field_errors import quote

# The last two only with libraries that mlxrun does not require.
ENCODINGS = ("gzip", "deflate", *(("br",) if HAS_BROTLI else ()), *(("zstd",) if HAS_ZSTD else ()))
_HEAD_END = b"\r\n\r\n"
_BUFFER_BYTES = 1 << 16  # of a parser that gets no body


def check_content_encoding(request: web.Request) -> None:
    """Raise WrongContentEncoding if the request has a body that aiohttp does not decode."""
    encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip()
    if request.body_exists and encoding.lower() not in ("", "identity", *ENCODINGS):
        raise WrongContentEncoding(
            f"the Content-Encoding {quote(encoding)} is not supported: "
            f"send the body as it is, or encoded as {' or '.join(ENCODINGS)}"
        )


def parse_undecodable(
    data: bytes, connection: web.RequestHandler, loop: asyncio.AbstractEventLoop
) -> RawRequestMessage | None:
    """Parse the head of a request whose encoding aiohttp knows, but cannot decode here. None if `data` does
    not begin with such a head."""
    parser = HttpRequestParser(connection, loop, _BUFFER_BYTES, auto_decompress=False)
    try:
        messages = parser.feed_data(data.partition(_HEAD_END)[0] + _HEAD_END)[0]
    except HttpProcessingError:
        return None
    found = messages[0][0] if messages else None
    return None if found is None or found.compression in (None, *ENCODINGS) else found
