"""PDFs made of their objects: pages of one colour, and files that no honest program writes."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

from mlxrun.api.text.media.images import Document
from mlxrun.api.text.media.pdf_process import draw_pages, measure_pages

COLOURS = {"red": b"1 0 0", "green": b"0 1 0", "blue": b"0 0 1", "white": b"1 1 1"}
RGB = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
Size = tuple[float, float]


def build_pdf(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """The file of these objects; the first is the catalog. `trailer`: more of its entries."""
    out = bytearray(b"%PDF-1.7\n")
    places = []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    start, size = len(out), len(objects) + 1
    out += b"xref\n0 %d\n0000000000 65535 f \n" % size
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R %b >>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer, start)
    return bytes(out)


def stream(content: bytes, entries: bytes = b"", packed: bool = False) -> bytes:
    """A stream object. `packed`: the content is compressed already."""
    data = content if packed else zlib.compress(content)
    return b"<< %b /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (entries, len(data), data)


def draw_circle(colour: str, size: Size) -> bytes:
    """A page's content: a circle in the middle of a white page."""
    x, y, r = size[0] / 2, size[1] / 2, 0.3 * min(size)
    k = 0.5523 * r
    steps = [(x + r, y + k, x + k, y + r, x, y + r), (x - k, y + r, x - r, y + k, x - r, y)]
    steps += [(x - r, y - k, x - k, y - r, x, y - r), (x + k, y - r, x + r, y - k, x + r, y)]
    curves = b" ".join(b"%g %g %g %g %g %g c" % step for step in steps)
    return b"%b rg %g %g m %b f" % (COLOURS[colour], x + r, y, curves)


def make_pdf(*colours: str, size: Size = (32, 48), circles: bool = False, trailer: bytes = b"") -> bytes:
    """A page of each colour, or with a circle of it. `size`: in points."""
    contents = [
        draw_circle(colour, size) if circles else b"%b rg 0 0 %g %g re f" % (COLOURS[colour], *size)
        for colour in colours
    ]
    return make_pages([stream(content) for content in contents], size, trailer=trailer)


def make_pages(
    contents: Sequence[bytes],
    size: Size = (32, 48),
    resources: bytes = b"",
    more: Sequence[bytes] = (),
    trailer: bytes = b"",
) -> bytes:
    """A page of each content stream. `more`: objects with numbers from 3 + twice the pages on."""
    count = len(contents)
    kids = b" ".join(b"%d 0 R" % (3 + 2 * i) for i in range(count))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, count),
    ]
    box = b"[0 0 %g %g]" % size
    for i, content in enumerate(contents):
        entries = (box, 4 + 2 * i, resources)
        page = b"<< /Type /Page /Parent 2 0 R /MediaBox %b /Contents %d 0 R /Resources << %b >> >>" % entries
        objects += [page, content]
    return build_pdf([*objects, *more], trailer)


def make_nested_forms(depth: int = 12) -> bytes:
    """A small file that takes hours to draw: each form draws the next one ten times."""
    head = b"/Type /XObject /Subtype /Form /BBox [0 0 32 48]"
    forms = [
        stream(b"/F Do " * 10, head + b" /Resources << /XObject << /F %d 0 R >> >>" % (6 + i))
        for i in range(depth)
    ]
    last = stream(b"0 0 1 rg 0 0 32 48 re f", head)
    return make_pages([stream(b"/F Do")], resources=b"/XObject << /F 5 0 R >>", more=[*forms, last])


def pdf_url(data: bytes, kind: str = "application/pdf") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def open_pdf(data: bytes, dpi: int = 72) -> Document:
    """A document as the loader opens it."""
    return Document(data, measure_pages(data, 100, dpi))


def list_colours(data: bytes, dpi: int = 72) -> list[str]:
    """The colour in the middle of each page."""
    names = {rgb: name for name, rgb in RGB.items()}
    found = draw_pages(data, open_pdf(data, dpi).sizes, dpi)
    middles = [page.getpixel((page.width // 2, page.height // 2)) for page in found]
    return [names[rgb] for rgb in middles if isinstance(rgb, tuple)]
