"""Colours and matplotlib settings of the plots, in a light and a dark version.

The background is transparent, so a plot sits on whatever page shows it. The SVG is deterministic: identifiers
come from a fixed salt, no date is written, and text stays text, so the fonts of this machine are not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("svg")

FONTS = ("Helvetica Neue", "Helvetica", "Liberation Sans", "Arial", "DejaVu Sans")


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one version. `ours` and `peer` fill bars; `faint` is for grid lines; `panel`,
    `strong` and `edge` are for the boxes of diagrams."""

    name: str
    text: str
    muted: str
    faint: str
    ours: str
    ours_text: str
    peer: str
    peer_light: str
    panel: str
    edge: str
    strong: str
    warn: str


LIGHT = Theme(
    name="light",
    text="#1f2328",
    muted="#59636e",
    faint="#e4e8ec",
    ours="#0969da",
    ours_text="#0550ae",
    peer="#818b98",
    peer_light="#c8d1da",
    panel="#f6f8fa",
    edge="#d1d9e0",
    strong="#ddf4ff",
    warn="#9a6700",
)
DARK = Theme(
    name="dark",
    text="#f0f6fc",
    muted="#9198a1",
    faint="#272d35",
    ours="#4493f8",
    ours_text="#79c0ff",
    peer="#767f8b",
    peer_light="#484f58",
    panel="#161b22",
    edge="#3d444d",
    strong="#121d2f",
    warn="#d29922",
)
THEMES = (LIGHT, DARK)


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """matplotlib's settings for one version, within the block."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # the reader's fonts count, not ours
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mlxrun",
        "font.family": "sans-serif",
        "font.sans-serif": list(FONTS),
        "font.size": 11,
        "text.color": theme.text,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.muted,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "xtick.color": theme.muted,
        "ytick.color": theme.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.spines.bottom": False,
        "axes.axisbelow": True,
        "grid.color": theme.faint,
        "grid.linewidth": 0.8,
    }
    with matplotlib.rc_context(settings):
        yield


def save(figure: Figure, path: Path, source: str) -> None:
    """Write the SVG, with `source` in its metadata, without a date and the name of its creator."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Source": source}
    )
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
