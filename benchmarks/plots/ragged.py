"""The engine beside mlx-lm's BatchGenerator: time of the whole job and peak memory, by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from benchmarks.plots.results import Report, day, machine_text, note_text, versions_text
from benchmarks.plots.theme import Theme

OURS, PEER = "mlxrun", "mlx-lm"
ORDER = ("ragged", "staggered", "mixed", "uniform")
WIDTH, ROW, TOP, BOTTOM = 9.0, 0.74, 1.05, 0.80  # inches
LEFT, RIGHT = 0.235, 0.635
BAR = 0.31


def draw(report: Report, theme: Theme) -> Figure:
    """Two panels that share their rows, one row a workload."""
    names = [name for name in ORDER if _has_runs(report["workloads"].get(name, {"sides": {}}))]
    height = TOP + ROW * len(names) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    bottom, share = BOTTOM / height, ROW * len(names) / height
    left: Axes = figure.add_axes((LEFT, bottom, 0.35, share))
    right: Axes = figure.add_axes((RIGHT, bottom, 0.35, share))
    scale = float(report["settings"]["scale"])
    _panel(left, _values(report, names, "wall_s", 1.0), "s", ("faster", "slower"), theme)
    memory = _values(report, names, "peak_bytes", 1e-9)
    small = max(max(pair) for pair in memory) < 5
    if small:
        memory = [(ours * 1000, peer * 1000) for ours, peer in memory]
    _panel(right, memory, "MB" if small else "GB", ("less", "more"), theme)
    for at, name in enumerate(names):
        place = left.get_yaxis_transform()
        left.text(-0.03, at - 0.13, name, transform=place, ha="right", va="center", fontweight="bold")
        shape = _shape(name, scale)
        left.text(
            -0.03, at + 0.20, shape, transform=place, ha="right", va="center", fontsize=8.5, color=theme.muted
        )
    _heads(figure, height, theme)
    for axes, label in (
        (left, "seconds, lower is better"),
        (right, f"{'megabytes' if small else 'gigabytes'}, lower is better"),
    ):
        axes.set_xlabel(label, fontsize=9, labelpad=4)
    _caption(figure, report, theme)
    return figure


def _has_runs(part: Mapping[str, Any]) -> bool:
    """Whether both sides have figures: one may have failed."""
    return all(part["sides"].get(side, {"runs": []})["runs"] for side in (OURS, PEER))


def _values(report: Report, names: Sequence[str], key: str, unit: float) -> list[tuple[float, float]]:
    """Ours and the peer's median of each workload."""
    sides = [report["workloads"][name]["sides"] for name in names]
    return [(s[OURS]["median"][key] * unit, s[PEER]["median"][key] * unit) for s in sides]


def _panel(
    axes: Axes, values: Sequence[tuple[float, float]], unit: str, words: tuple[str, str], theme: Theme
) -> None:
    most = max(max(pair) for pair in values)
    axes.set_xlim(0, most * 1.22)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(axis="x")
    axes.tick_params(length=0, labelsize=9)
    axes.set_xticks(
        [tick for tick in MaxNLocator(nbins=4, steps=[1, 2, 5, 10]).tick_values(0, most) if tick <= most]
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    gap = most * 0.014
    for at, (ours, peer) in enumerate(values):
        axes.barh(at - BAR / 2 - 0.02, ours, BAR, color=theme.ours)
        axes.barh(at + BAR / 2 + 0.02, peer, BAR, color=theme.peer)
        better = peer >= ours
        ratio = f"{number(peer / ours)}× {words[0]}" if better else f"{number(ours / peer)}× {words[1]}"
        label = f"{number(ours)} {unit} · {ratio}"
        upper, lower = at - BAR / 2, at + BAR / 2 + 0.04
        plain: dict[str, Any] = {"va": "center", "fontsize": 9.5}
        axes.text(
            ours + gap,
            upper,
            label,
            color=theme.ours_text if better else theme.warn,
            fontweight="bold",
            **plain,
        )
        axes.text(peer + gap, lower, f"{number(peer)} {unit}", color=theme.muted, **plain)


def number(value: float) -> str:
    """A number as a label shows it: 0.056, 1.7, 16.9, 1,998."""
    if value >= 99.5:
        return f"{value:,.0f}"
    if value >= 0.995:
        return f"{value:.1f}"
    return f"{value:.2g}"


def _shape(name: str, scale: float) -> str:
    """What the workload is, in tokens at this scale."""

    def tokens(count: int) -> str:
        return f"{round(count * scale):,}"

    return {
        "ragged": f"1 × {tokens(16384)} + 31 × {tokens(256)} tokens",
        "staggered": f"1 × {tokens(16384)} joins 31 × {tokens(256)}",
        "mixed": f"4 × {tokens(8192)} + 8 × {tokens(2048)} + 20 × {tokens(512)}",
        "uniform": f"32 × {tokens(512)} tokens",
    }[name]


def _heads(figure: Figure, height: float, theme: Theme) -> None:
    top = 1 - 0.26 / height
    figure.text(
        0.012,
        top,
        "32 prompts in one batch: mlxrun and mlx-lm’s BatchGenerator",
        fontsize=13,
        fontweight="bold",
        va="center",
    )
    second = 1 - 0.58 / height
    for x, colour, label in ((0.012, theme.ours, OURS), (0.105, theme.peer, "mlx-lm BatchGenerator")):
        figure.text(x, second, "■", color=colour, fontsize=12, va="center")
        figure.text(x + 0.02, second, label, fontsize=10, va="center", color=theme.text)
    third = 1 - 0.90 / height
    figure.text(LEFT, third, "Time of the whole job", fontsize=11, fontweight="bold", va="center")
    figure.text(RIGHT, third, "Peak memory, weights included", fontsize=11, fontweight="bold", va="center")


def _caption(figure: Figure, report: Report, theme: Theme) -> None:
    model, settings = report["model"], report["settings"]
    size = {"tiny": "1M parameters", "qwen3-0.6b": "Qwen3-0.6B’s shape"}.get(model["name"], model["name"])
    first = (
        f"{machine_text(report)}{note_text(report)}; {size}, {model['dtype']}, random weights; "
        f"greedy, fixed answer lengths; median of {settings['repeat']} runs in turns."
    )
    versions = versions_text(report["versions"], ("mlx", "mlx-lm", "Python"))
    base: dict[str, Any] = {"fontsize": 8.5, "color": theme.muted, "va": "center"}
    height = figure.get_figheight()
    figure.text(0.012, 0.26 / height, first, **base)
    figure.text(0.012, 0.10 / height, f"{versions}; {day(report)}. {command(report)}", **base)


def command(report: Report) -> str:
    """The command without where its JSON went and which workloads were chosen."""
    words = str(report["command"]).split()
    kept = []
    while words:
        word = words.pop(0)
        if word in ("--json", "--workload"):
            words.pop(0)
        else:
            kept.append(word)
    return " ".join(kept)
