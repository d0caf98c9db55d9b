"""The server beside its peers: output tokens a second and TTFT p95, by workload."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots.ragged import number
from benchmarks.plots.results import Report, day, machine_text, note_text
from benchmarks.plots.theme import Theme
from benchmarks.serve_peers import PRELOADED

OURS = "mlxrun"
PEERS = ("mlx_lm.server", "mlx_vlm.server", "vllm-mlx")
WORKLOADS = {"chat": "All prompts differ", "shared": "Nine tenths of all prompts are the same"}
WIDTH, TOP, BLOCK, BOTTOM = 9.0, 1.02, 2.36, 0.72  # inches
DRAW = 1.15  # a ratio up to this one is a draw
HEAD = 0.34  # inches above the bars of a block
LEFT, RIGHT, SPAN = 0.165, 0.60, 0.385


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: where it stands, its value, and whether its server ran with the preloaded library."""

    name: str
    y: float
    value: float
    preloaded: bool


def draw(report: Report, theme: Theme) -> Figure:
    """Two workloads below each other, each with two measures."""
    names = [name for name in WORKLOADS if name in report["workloads"]]
    height = TOP + BLOCK * len(names) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    for at, name in enumerate(names):
        top = TOP + at * BLOCK
        low = (height - top - BLOCK + 0.10) / height
        share = (BLOCK - HEAD - 0.10) / height
        figure.text(
            0.012, 1 - (top + 0.14) / height, WORKLOADS[name], fontsize=11, fontweight="bold", va="center"
        )
        left: Axes = figure.add_axes((LEFT, low, SPAN, share))
        right: Axes = figure.add_axes((RIGHT, low, SPAN, share))
        _panel(left, _bars(report, name, "output_rate", 1.0), "tok/s", True, theme)
        _panel(right, _bars(report, name, "ttft_p95", 1000.0), "ms", False, theme)
        _names(left, theme)
    _heads(figure, height, theme)
    _caption(figure, height, report, theme)
    return figure


def _bars(report: Report, workload: str, key: str, unit: float) -> list[Bar]:
    sides = report["workloads"][workload]
    bars = [Bar(OURS, 0.0, sides[OURS]["median"][key] * unit, False)]
    for at, peer in enumerate(PEERS, start=1):
        for full, shift in ((f"{peer}{PRELOADED}", -0.21), (peer, 0.21)):
            if full in sides and sides[full]["median"][key] is not None:
                bars.append(Bar(peer, at + shift, sides[full]["median"][key] * unit, full != peer))
    return bars


def _panel(axes: Axes, bars: list[Bar], unit: str, more: bool, theme: Theme) -> None:
    """Bars with their values; how many times better ours is stands in a column on the right."""
    most = max(bar.value for bar in bars)
    axes.set_xlim(0, most * 1.56)
    axes.set_ylim(3.55, -0.55)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.axvline(0, color=theme.muted, linewidth=1)
    ours = bars[0].value
    for bar in bars:
        is_ours = bar.name == OURS
        colour = theme.ours if is_ours else theme.peer if bar.preloaded else theme.peer_light
        axes.barh(bar.y, bar.value, 0.56 if is_ours else 0.36, color=colour)
        weight = "bold" if is_ours else "normal"
        text = theme.ours_text if is_ours else theme.text
        label = f"{bar.value:,.0f} {unit}"
        axes.text(
            bar.value + most * 0.015,
            bar.y + 0.02,
            label,
            va="center",
            fontsize=9.5,
            color=text,
            fontweight=weight,
        )
        if is_ours:
            continue
        ratio = ours / bar.value if more else bar.value / ours
        shade = theme.muted if DRAW > ratio > 1 / DRAW else theme.ours_text if ratio > 1 else theme.warn
        place = axes.get_yaxis_transform()
        axes.text(
            1, bar.y + 0.02, f"{number(ratio)}×", transform=place, ha="right", va="center",
            fontsize=9.5, fontweight="bold", color=shade,
        )  # fmt: skip


def _names(axes: Axes, theme: Theme) -> None:
    place = axes.get_yaxis_transform()
    for at, name in enumerate((OURS, *PEERS)):
        weight = "bold" if name == OURS else "normal"
        axes.text(-0.03, at, name, transform=place, ha="right", va="center", fontsize=10, fontweight=weight)


def _heads(figure: Figure, height: float, theme: Theme) -> None:
    title = "16 streams of chats: mlxrun serve and its peers"
    figure.text(0.012, 1 - 0.24 / height, title, fontsize=13, fontweight="bold", va="center")
    second = 1 - 0.56 / height
    entries = (
        (0.012, theme.ours, "mlxrun (loads OpenBLAS itself)"),
        (0.285, theme.peer, "peer with OpenBLAS preloaded"),
        (0.555, theme.peer_light, "peer as it installs"),
    )
    for x, colour, label in entries:
        figure.text(x, second, "■", color=colour, fontsize=12, va="center")
        figure.text(x + 0.02, second, label, fontsize=9.5, va="center")
    third = 1 - 0.86 / height
    for x, label in ((LEFT, "Output: higher is better"), (RIGHT, "TTFT p95: lower is better")):
        figure.text(x, third, label, fontsize=9.5, va="center", color=theme.muted)
        figure.text(
            x + SPAN, third, "mlxrun better", fontsize=9.5, va="center", ha="right", color=theme.ours_text
        )


def _caption(figure: Figure, height: float, report: Report, theme: Theme) -> None:
    settings, versions, own = report["settings"], report["peer_versions"], report["versions"]
    lm, vlm, vllm = versions["mlx_lm.server"], versions["mlx_vlm.server"], versions["vllm-mlx"]
    where = f"{machine_text(report)}, which the client shares{note_text(report)}"
    sizes = f"{settings['prompt_words']} words in, {settings['output_tokens']} tokens out"
    count = len(next(iter(report["workloads"].values()))[OURS]["runs"])
    runs = f" of {report['reports']} runs" if report["reports"] > 1 else ""
    rounds = f"{settings['requests']} requests a round, median of {count} rounds in turns{runs}"
    peers = f"mlx-lm {lm['mlx-lm']}, mlx-vlm {vlm['mlx-vlm']}, vllm-mlx {vllm['vllm-mlx']}"
    lines = (
        f"×: how many times better mlxrun is than that server. {where}.",
        f"1M parameters, float32, random weights; {sizes}; {rounds}.",
        f"mlx {own['mlx']}, {peers} (with mlx-lm {vllm['mlx-lm']}), Python {own['python']}; {day(report)}. "
        "python -m benchmarks.serve_peers",
    )
    for at, line in enumerate(reversed(lines)):
        y = (0.12 + 0.165 * at) / height
        figure.text(0.012, y, line, fontsize=8.5, color=theme.muted, va="center")
