"""The encodings of bodies (`Content-Encoding`). aiohttp decodes those of ENCODINGS while a body arrives.

A body with another encoding is refused, as aiohttp would hand it over undecoded. It refuses `br` and `zstd`
itself where it lacks a library, before the path is known.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.compression_utils import HAS_BROTLI, HAS_ZSTD

from mlxrun.core.errors import WrongContentEncoding
from mlxrun.core.field_errors import quote

# The last two only with libraries that mlxrun does not require.
ENCODINGS = ("gzip", "deflate", *(("br",) if HAS_BROTLI else ()), *(("zstd",) if HAS_ZSTD else ()))


def check_content_encoding(request: web.Request) -> None:
    """Raise WrongContentEncoding if the request has a body that aiohttp does not decode."""
    encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip()
    if request.body_exists and encoding.lower() not in ("", "identity", *ENCODINGS):
        raise WrongContentEncoding(
            f"the Content-Encoding {quote(encoding)} is not supported: "
            f"send the body as it is, or encoded as {' or '.join(ENCODINGS)}"
        )
