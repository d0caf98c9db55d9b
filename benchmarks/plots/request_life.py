"""The life of a request as a diagram, drawn as plain SVG: `draw(theme)`."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from benchmarks.plots.theme import FONTS, Theme

WIDTH, HEIGHT = 960, 446


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines of notes; its left upper corner and its size."""

    x: float
    y: float
    width: float
    height: float
    title: str
    notes: tuple[str, ...] = ()
    kind: str = "box"


THREAD = Box(596, 36, 340, 390, "")
BOXES = (
    Box(24, 70, 148, 54, "HTTP body", ("OpenAI, Anthropic",)),
    Box(24, 136, 148, 54, "Job line", ("JSONL file",)),
    Box(
        208,
        70,
        168,
        120,
        "Text side",
        ("validates every field", "chat template", "images to pixels", "token ids"),
    ),
    Box(412, 70, 148, 120, "Engine client", ("asyncio", "a collector for", "each request")),
    Box(412, 290, 148, 112, "Collector", ("merges events until", "they are taken")),
    Box(208, 290, 168, 112, "Answer text", ("detokeniser", "stop strings", "reasoning, tool calls")),
    Box(24, 290, 148, 50, "SSE stream", ("or one JSON body",)),
    Box(24, 352, 148, 50, "Output line", ("score, journal",)),
    Box(640, 78, 186, 34, "Inbox"),
    Box(640, 136, 186, 62, "Scheduler · schedule", ("decode rows, prompt chunks",), "strong"),
    Box(640, 222, 186, 62, "Model runner · execute", ("one forward over row groups",), "strong"),
    Box(640, 308, 186, 62, "Scheduler · update", ("stop ids, lengths, events",), "strong"),
    Box(850, 136, 70, 148, "Prefix\ncache", ("memory", "and disk")),
)
ARROWS = (
    "M172 97H206",
    "M172 163H206",
    "M376 130H410",
    "M560 95H638",
    "M733 112V134",
    "M733 198V220",
    "M733 284V306",
    "M640 346H562",
    "M412 346H378",
    "M208 315H174",
    "M208 377H174",
)
BOTH_WAYS = ("M828 167H848", "M828 253H848")
NEXT_STEP = "M640 324H630Q618 324 618 312V179Q618 167 630 167H638"


def draw(theme: Theme) -> str:
    """The SVG in one theme."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="The life of a request, from its body to its answer">',
        _style(theme),
        '<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0 1L9 5L0 9z"/></marker></defs>',
        f'<rect class="thread" {_place(THREAD)} rx="12"/>',
        _label(24, 54, "Request"),
        _label(24, 274, "Answer"),
        _label(616, 62, "Engine thread"),
        '<text class="note" x="616" y="402">The only thread that touches the model.</text>',
        *(_box(box) for box in BOXES),
        *(f'<path class="arrow" d="{d}" marker-end="url(#head)"/>' for d in ARROWS),
        *(
            f'<path class="arrow" d="{d}" marker-start="url(#head)" marker-end="url(#head)"/>'
            for d in BOTH_WAYS
        ),
        f'<path class="arrow next" d="{NEXT_STEP}" marker-end="url(#head)"/>',
        '<text class="note middle" transform="translate(611 246) rotate(-90)">next step</text>',
    ]
    return "\n".join([*parts, "</svg>\n"])


def _style(theme: Theme) -> str:
    fonts = ",".join(f"'{name}'" if " " in name else name for name in (*FONTS, "sans-serif"))
    return (
        f"<style>text{{font-family:{fonts};fill:{theme.text}}}.title{{font-size:14px;font-weight:bold}}"
        f".note{{font-size:12px;fill:{theme.muted}}}.middle{{text-anchor:middle}}"
        f".label{{font-size:12px;font-weight:bold;fill:{theme.muted};letter-spacing:.4px}}"
        f".box{{fill:{theme.panel};stroke:{theme.edge}}}.strong{{fill:{theme.strong};stroke:{theme.ours}}}"
        f".thread{{fill:none;stroke:{theme.edge};stroke-dasharray:5 4}}"
        f".arrow{{fill:none;stroke:{theme.muted};stroke-width:1.5}}.head{{fill:{theme.muted}}}"
        f".next{{stroke-dasharray:4 3}}</style>"
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text class="label" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _box(box: Box) -> str:
    """The rectangle; its title and notes stand in its middle."""
    lines = [*(("title", part) for part in box.title.split("\n")), *(("note", note) for note in box.notes)]
    high = sum(_line_height(kind) for kind, _ in lines)
    y = box.y + (box.height - high) / 2
    out = [f'<rect class="{box.kind}" {_place(box)} rx="7"/>']
    for kind, text in lines:
        y += _line_height(kind)
        centre = box.x + box.width / 2
        out.append(f'<text class="{kind} middle" x="{centre:g}" y="{y - 5.5:g}">{escape(text)}</text>')
    return "".join(out)


def _place(box: Box) -> str:
    return f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'


def _line_height(kind: str) -> float:
    return 20 if kind == "title" else 17
