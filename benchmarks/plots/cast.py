"""Draws an asciicast as an animated SVG: `draw(path)`.

`pyte` plays the recording. Every row of the terminal becomes a strip of its successive contents, which one
CSS animation moves behind a window of one row. There are no scripts: it also moves inside an `<img>`.
Waits are shortened; the title bar says by how much. A reader who asked for less motion sees the last frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

SECONDS = 17.0  # of the recording, as shown
HOLD = 4.0  # seconds that the last frame stays
SHORT = 0.09  # seconds: gaps up to this one, as between keys, keep their length
FRAME = 1 / 10  # seconds: changes that follow each other faster are shown together
CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 8.4, 18.0, 14.0
PADDING, BAR = 16.0, 40.0
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono','DejaVu Sans Mono',monospace"
BACKGROUND, EDGE, TITLE, DEFAULT, DIM = "#0d1117", "#30363d", "#161b22", "#e6edf3", "#8b949e"
CAPTION = "#79c0ff"
NAMED = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#3fb950",
    "brown": "#d29922",
    "yellow": "#d29922",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "cyan": "#39c5cf",
    "white": "#b1bac4",
}
# Box-drawing characters as lines from the middle of the cell: up, down, left, right; 1 is thin, 2 is thick.
BOXES = {
    "─": "0011", "━": "0022", "│": "1100", "┃": "2200", "╸": "0020", "╺": "0002",
    "┏": "0202", "┓": "0220", "┳": "0222", "┡": "2102", "╇": "2122", "┩": "2120",
    "└": "1001", "┘": "1010", "┴": "1011", "┌": "0101", "┐": "0110", "┼": "1111",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One character with its colour."""

    text: str
    colour: str
    bold: bool = False
    italic: bool = False
    cursor: bool = False


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The terminal from this second of the animation on."""

    at: float
    rows: tuple[Row, ...]
    caption: str


def draw(path: Path) -> str:
    """The SVG of the recording."""
    header, *events = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    times = _times(events)
    frames = list(_frames(header, events, times))
    total = frames[-1].at + HOLD
    width = header["width"] * CELL_WIDTH + 2 * PADDING
    rows = max(1 + max((i for i, row in enumerate(f.rows) if row), default=0) for f in frames)
    height = BAR + rows * CELL_HEIGHT + 2 * PADDING
    styles, body = [], []
    for number in range(rows):
        parts = [(frame.at, _row(frame.rows[number])) for frame in frames]
        top = BAR + PADDING + number * CELL_HEIGHT
        rule, element = _strip(f"r{number}", parts, PADDING, top, width - 2 * PADDING, CELL_HEIGHT, total)
        styles.append(rule)
        body.append(element)
    captions = [(frame.at, _caption(frame.caption)) for frame in frames]
    rule, element = _strip("caption", captions, 90, 0, width - 220, BAR, total)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(header["title"])}: killed, and resumed">',
            f"<style>text{{font:{FONT_SIZE:g}px {FONTS};white-space:pre}}.b{{font-weight:bold}}"
            ".i{font-style:italic}@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
            + "".join([*styles, rule])
            + "</style>",
            *_window(width, height, f"{float(events[-1][0]):.0f} s in {times[-1]:.0f} s"),
            element,
            *body,
            "</svg>\n",
        ]
    )


# -- time -------------------------------------------------------------------------------------------


def _times(events: Sequence[Sequence[object]]) -> list[float]:
    """When each event is shown: `SECONDS` for all of them.

    Short gaps keep their length, and so do those before a marker: what has just happened is to be read.
    """
    moments = [float(str(event[0])) for event in events]
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    kept = [g if event[1] == "m" or g <= SHORT else 0.0 for g, event in zip(gaps, events, strict=True)]
    rest = sum(gaps) - sum(kept)
    share = min(1.0, max(0.0, SECONDS - sum(kept)) / rest) if rest else 1.0
    shown, now = [], 0.0
    for gap, keep in zip(gaps, kept, strict=True):
        now += keep + (gap - keep) * share
        shown.append(now)
    return shown


def _frames(
    header: Mapping[str, int], events: Sequence[Sequence[object]], times: Sequence[float]
) -> Iterator[Frame]:
    """Play the recording; changes within `FRAME` seconds are one frame."""
    screen = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(screen)
    caption = ""
    for at, (event, now) in enumerate(zip(events, times, strict=True)):
        if event[1] == "m":
            caption = str(event[2])
        else:
            stream.feed(str(event[2]))
        after = times[at + 1] if at + 1 < len(times) else now + 1
        if at == 0 or int(after / FRAME) > int(now / FRAME):
            yield Frame(0.0 if at == 0 else now, _rows(screen), caption)


def _rows(screen: pyte.Screen) -> tuple[Row, ...]:
    rows = []
    for y in range(screen.lines):
        cells = [_cell(screen, x, y) for x in range(screen.columns)]
        while cells and cells[-1].text == " " and not cells[-1].cursor:
            cells.pop()
        rows.append(tuple(cells))
    return tuple(rows)


def _cell(screen: pyte.Screen, x: int, y: int) -> Cell:
    found = screen.buffer[y][x]
    colour = DEFAULT if found.fg == "default" else NAMED.get(found.fg, f"#{found.fg}")
    cursor = not screen.cursor.hidden and (screen.cursor.x, screen.cursor.y) == (x, y)
    return Cell(found.data, colour, found.bold, found.italics, cursor)


# -- drawing ----------------------------------------------------------------------------------------


def _strip(
    name: str,
    parts: Sequence[tuple[float, str]],
    x: float,
    y: float,
    width: float,
    height: float,
    total: float,
) -> tuple[str, str]:
    """A window on contents that follow each other: the CSS rule, and the element."""
    changes = [next(group) for _, group in groupby(parts, key=lambda part: part[1])]
    contents = list(dict.fromkeys(part for _, part in changes))
    step = 2 * height  # a gap between contents: what stands out of one is not seen with the next
    frames = [f'<g transform="translate(0 {i * step:g})">{c}</g>' for i, c in enumerate(contents) if c]
    if not frames:
        return "", ""
    steps = [(at, contents.index(part)) for at, part in changes]
    rule = ""
    if len(changes) > 1:
        marks = "".join(
            f"{100 * at / total:.3f}%{{transform:translateY({-i * step:g}px)}}" for at, i in steps
        )
        last = f"transform:translateY({-steps[-1][1] * step:g}px)"
        rule = (
            f".{name}{{{last};animation:{name} {total:.2f}s step-end infinite}}@keyframes {name}{{{marks}}}"
        )
    window = f'<svg x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" overflow="hidden">'
    return rule, f'{window}<g class="{name}">{"".join(frames)}</g></svg>'


def _row(row: Row) -> str:
    """One row's characters: runs of one style; lines of boxes as shapes, the same in every font."""
    out = []
    x = 0
    for (colour, bold, italic, box, cursor), group in groupby(row, key=_style):
        cells = list(group)
        if cursor:
            out.append(_rectangle(x * CELL_WIDTH, 1, CELL_WIDTH, CELL_HEIGHT - 2, DIM))
        elif box:
            out.extend(_box(box, x, len(cells), colour))
        else:
            out.append(_text("".join(cell.text for cell in cells), x, colour, bold, italic))
        x += len(cells)
    return "".join(out)


def _style(cell: Cell) -> tuple[str, bool, bool, str, bool]:
    box = cell.text if cell.text in BOXES else ""
    blank = cell.text == " "
    return (
        cell.colour if not blank else DEFAULT,
        cell.bold and not blank and not box,
        cell.italic and not blank,
        box,
        cell.cursor,
    )


def _text(text: str, x: int, colour: str, bold: bool, italic: bool) -> str:
    stripped = text.strip()
    if not stripped:
        return ""
    start = x + len(text) - len(text.lstrip())
    names = " ".join(name for name, on in (("b", bold), ("i", italic)) if on)
    style = f' class="{names}"' if names else ""
    long = len(stripped) * CELL_WIDTH
    return (
        f'<text x="{start * CELL_WIDTH:g}" y="{CELL_HEIGHT * 0.74:g}" fill="{colour}"{style} '
        f'textLength="{long:g}" lengthAdjust="spacingAndGlyphs">{escape(stripped, quote=False)}</text>'
    )


def _box(char: str, x: int, count: int, colour: str) -> Iterator[str]:
    """A run of one box-drawing character."""
    up, down, left, right = (1.1 * int(weight) for weight in BOXES[char])
    middle = CELL_HEIGHT / 2
    if left and right:
        yield _rectangle(x * CELL_WIDTH, middle - left / 2, count * CELL_WIDTH, left, colour)
    for at in range(count):
        centre = (x + at + 0.5) * CELL_WIDTH
        if left and not right:
            yield _rectangle(
                centre - CELL_WIDTH / 2, middle - left / 2, CELL_WIDTH / 2 + up / 2, left, colour
            )
        if right and not left:
            yield _rectangle(centre - up / 2, middle - right / 2, CELL_WIDTH / 2 + up / 2, right, colour)
        if up:
            yield _rectangle(centre - up / 2, 0, up, middle, colour)
        if down:
            yield _rectangle(centre - down / 2, middle, down, middle, colour)


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="{colour}"/>'


def _caption(text: str) -> str:
    return f'<text x="0" y="{BAR * 0.62:g}" fill="{CAPTION}" class="b">{escape(text, quote=False)}</text>'


def _window(width: float, height: float, note: str) -> list[str]:
    """The frame, three dots and the note on how much faster it is shown."""
    inner = f'width="{width - 1:g}" height="{height - 1:g}" rx="8"'
    dots = [
        f'<circle cx="{24 + 18 * i}" cy="{BAR / 2:g}" r="6" fill="{fill}"/>'
        for i, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    return [
        f'<rect x=".5" y=".5" {inner} fill="{BACKGROUND}" stroke="{EDGE}"/>',
        f'<path d="M.5 {BAR:g}H{width - 0.5:g}" stroke="{EDGE}"/>',
        *dots,
        f'<text x="{width - PADDING:g}" y="{BAR * 0.62:g}" fill="{DIM}" text-anchor="end">{note}</text>',
    ]
