"""The charts of a report as SVG. Colours come from the page's style sheet, through classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

PLOT_WIDTH = 260  # of an interval
PLOT_HEIGHT = 22
_TREND_HEIGHT = 48
_WIDTH, _HEIGHT = 280, 120  # of a series, in the units of its view box
_LEFT, _BOTTOM, _TOP = 38, 18, 8


def draw_interval(
    value: float, interval: tuple[float, float] | None, domain: tuple[float, float], name: str
) -> Markup:
    """Draw a dot with its interval on a line from one end of `domain` to the other. Screen readers read
    `name`."""
    low, high = domain

    def place(number: float) -> float:
        return round(6 + (PLOT_WIDTH - 12) * (min(max(number, low), high) - low) / (high - low), 1)

    middle = PLOT_HEIGHT / 2
    parts = [_draw_grid(place, domain)]
    if interval is not None:
        left, right = map(place, interval)
        parts.append(f'<line class="whisker" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}"/>')
    parts.append(f'<circle class="dot" cx="{place(value)}" cy="{middle}" r="4"/>')
    return _wrap_interval(parts, PLOT_HEIGHT, name)


def draw_axis(domain: tuple[float, float]) -> Markup:
    """Draw the labels under or above a column of intervals."""
    low, high = domain
    places = [low + (high - low) * part / 4 for part in range(5)]
    labels = []
    for part, each in enumerate(places):
        x = round(6 + (PLOT_WIDTH - 12) * part / 4, 1)
        label = f"{100 * each:.3g}".replace("-", "\N{MINUS SIGN}")
        labels.append(f'<text x="{x}" y="12" text-anchor="middle">{label}</text>')
    return _wrap_interval(labels, 16, "")


def _draw_grid(place: Callable[[float], float], domain: tuple[float, float]) -> str:
    low, high = domain
    lines = []
    for part in range(5):
        value = low + (high - low) * part / 4
        name = "zero-line" if low < 0 and abs(value) < 1e-12 else "grid"
        lines.append(
            f'<line class="{name}" x1="{place(value)}" x2="{place(value)}" y1="0" y2="{PLOT_HEIGHT}"/>'
        )
    return "".join(lines)


def draw_shares(parts: Sequence[tuple[str, int]], name: str) -> Markup:
    """Draw a bar whose parts are as long as their numbers. `parts`: class and number of each."""
    whole = sum(number for _, number in parts) or 1
    shapes, left = [], 0.0
    for style, number in parts:
        width = 100 * number / whole
        if number:
            size = f'x="{left:.3f}" y="0" width="{width:.3f}" height="12"'
            shapes.append(f'<rect class="{style}" {size} fill="currentColor"/>')
        left += width
    return _wrap(shapes, 100, 12, name, 'preserveAspectRatio="none"')


def draw_series(
    values: Sequence[Sequence[float | None]],
    seconds: float,
    name: str,
    *,
    top: float,
    resumes: Sequence[float] = (),
) -> Markup:
    """Draw values over time, on a scale from 0 to `top`. `seconds`: the length of the time; `resumes`: when
    further runs began. The first series is a line above its area; a second one is the upper edge of the
    area."""
    count = len(values[0])

    def x(at: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 4) * at, 1)

    def y(value: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(value, top) / top), 1)

    parts = []
    for share in (0.0, 0.5, 1.0):
        height = y(top * share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 4}" y1="{height}" y2="{height}"/>')
        label = f"{top * share / 1000:g}k" if top * share >= 10_000 else f"{top * share:g}"
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4}" text-anchor="end">{escape(label)}</text>')
    for time in resumes:
        at = x(time / seconds)
        parts.append(f'<line class="resume" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for points in _split_at_gaps(values[0]):
        places = [(x((at + 0.5) / count), y(value)) for at, value in points]
        edge = values[-1] if len(values) > 1 else None
        upper = [(x((at + 0.5) / count), y(edge[at] or value)) for at, value in points] if edge else places
        floor = [*reversed(places)] if edge else [(places[-1][0], y(0)), (places[0][0], y(0))]
        parts.append(f'<path class="area" d="{_trace([*upper, *floor])}Z"/>')
        if len(places) == 1:
            parts.append(f'<circle class="dot" cx="{places[0][0]}" cy="{places[0][1]}" r="1.6"/>')
        parts.append(f'<path class="line" d="{_trace(places)}"/>')
    for at, anchor in ((0.0, "start"), (1.0, "end")):
        text = "0" if at == 0 else format_seconds(seconds)
        parts.append(f'<text x="{x(at)}" y="{_HEIGHT - 4}" text-anchor="{anchor}">{text}</text>')
    return _wrap(parts, _WIDTH, _HEIGHT, name)


def draw_trend(values: Sequence[float], intervals: Sequence[tuple[float, float] | None], name: str) -> Markup:
    """Draw values one after the other as a line of dots with their intervals. The scale is from the lowest to
    the highest of all."""
    ends = [*values, *(end for interval in intervals for end in interval or ())]
    low, high = min(ends), max(ends)

    def place(value: float) -> float:
        return round(_TREND_HEIGHT - 5 - (_TREND_HEIGHT - 10) * (value - low) / ((high - low) or 1.0), 1)

    step = (PLOT_WIDTH - 12) / max(1, len(values) - 1)
    places = [(round(6 + at * step, 1), place(value)) for at, value in enumerate(values)]
    parts = [f'<path class="line" d="{_trace(places)}"/>']
    for (x, y), interval in zip(places, intervals, strict=True):
        if interval is not None:
            bottom, top = map(place, interval)
            parts.append(f'<line class="whisker" x1="{x}" x2="{x}" y1="{bottom}" y2="{top}"/>')
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="2.5"/>')
    return _wrap(parts, PLOT_WIDTH, _TREND_HEIGHT, name, f'width="{PLOT_WIDTH}" height="{_TREND_HEIGHT}"')


def _split_at_gaps(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Runs of values without a None, with their places."""
    found: list[list[tuple[int, float]]] = [[]]
    for at, value in enumerate(values):
        if value is not None:
            found[-1].append((at, value))
        elif found[-1]:
            found.append([])
    return [points for points in found if points]


def _trace(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def choose_top(value: float) -> float:
    """Choose a round number (1, 2 or 5 times a power of ten) that is not below the value."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power >= value:
        power /= 10
    while power * 10 < value:
        power *= 10
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value)


def format_seconds(seconds: float) -> str:
    """Format seconds as `0.42 s`, `12 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 2:
        return f"{round(seconds)} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _wrap_interval(parts: Sequence[str], height: int, name: str) -> Markup:
    """A part of a column of intervals, which all have the same scale and so the same size."""
    size = f'class="forest" width="{PLOT_WIDTH}" height="{height}"'
    return _wrap(parts, PLOT_WIDTH, height, name, size)


def _wrap(parts: Sequence[str], width: int, height: int, name: str, attributes: str = "") -> Markup:
    """The SVG element; without a name it is not read aloud."""
    read = f'role="img" aria-label="{escape(name)}"' if name else 'aria-hidden="true"'
    return Markup(f'<svg viewBox="0 0 {width} {height}" {attributes} {read}>{"".join(parts)}</svg>')
