"""How far a job is: counters and rates (Meter), and how they are shown: a bar on a terminal, lines in a pipe.

Everything goes to standard error. The end is estimated in tokens: lines left x the average prompt and
answer, at the rate so far. The clock is given, so tests need not wait.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from mlxrun.batch.job_cache import summary

WINDOW = 30.0  # seconds over which rates are taken
PLAIN_EVERY = 10.0
Clock = Callable[[], float]


@dataclass(slots=True)
class ProgressMeter:
    """Counters of one job. `done`, `failed`, `all_*` include earlier runs; the rest is this run."""

    clock: Clock
    total: int = 0
    done: int = 0
    failed: int = 0
    all_prompt: int = 0
    all_output: int = 0
    done_here: int = 0
    failed_here: int = 0
    running: int = 0
    computed: int = 0
    reused: int = 0
    output: int = 0
    counters: Callable[[], Mapping[str, int]] = dict  # of the engine's cache
    _left: int = 0  # tokens of lines that are over, whatever became of them
    _seen: tuple[int, int, int] = (0, 0, 0)  # lines that were tokenised; their prompt tokens and max_tokens
    _over: tuple[int, int] = (0, 0)  # lines that were answered; their output tokens
    _started: float | None = None
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)

    def seen(self, prompt: int, max_tokens: int) -> None:
        """A line was tokenised."""
        lines, prompts, most = self._seen
        self._seen = lines + 1, prompts + prompt, most + max_tokens

    def progress(self, computed: int, reused: int, output: int) -> None:
        """So many more tokens."""
        if self._started is None:
            self._started = self.clock()
        self.computed += computed
        self.reused += reused
        self.output += output

    def finished(self, failed: bool, prompt: int, output: int, spent: int) -> None:
        """A line is over; `spent` is all that `progress` was told of it."""
        self.done += not failed
        self.failed += failed
        self.done_here += not failed
        self.failed_here += failed
        self.all_prompt += prompt
        self.all_output += output
        self._left += spent
        if not failed:
            self._over = self._over[0] + 1, self._over[1] + output

    def rates(self) -> tuple[float, float]:
        """Prompt and output tokens a second, over the last WINDOW seconds. Call it now and then."""
        if self._started is None:
            return 0.0, 0.0
        now = self.clock()
        self._samples = self._samples or deque([(self._started, 0, 0)])
        if now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, self.computed, self.output))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW:
            self._samples.popleft()
        then, computed, output = self._samples[0]
        span = now - then
        if span <= 0:
            return 0.0, 0.0
        return (self.computed - computed) / span, (self.output - output) / span

    def eta(self) -> float | None:
        """Seconds to the end; None while nothing is known."""
        lines, prompts, most = self._seen
        spent = self.computed + self.reused + self.output
        if self._started is None or not lines or not spent:
            return None
        elapsed = self.clock() - self._started
        answers = self._over[1] / self._over[0] if self._over[0] else most / lines
        todo = max(0, self.total - self.done - self.failed) * (prompts / lines + answers)
        return max(0.0, todo - (spent - self._left)) * elapsed / spent

    def freeze(self) -> None:
        """Keep the counters of the cache as they are: the engine is about to end."""
        last = dict(self.counters())
        self.counters = lambda: last

    @property
    def cached_share(self) -> float:
        """Share of this run's prompt tokens that were not computed."""
        prompt = self.computed + self.reused
        return self.reused / prompt if prompt else 0.0

    def status(self) -> dict[str, Any]:
        """The counters as status.json holds them."""
        prompt_rate, output_rate = self.rates()
        eta = self.eta()
        return {
            "total": self.total,
            "done": self.done,
            "failed": self.failed,
            "running": self.running,
            "tokens": {"computed": self.computed, "reused": self.reused, "output": self.output},
            "rates": {"prompt": round(prompt_rate, 1), "output": round(output_rate, 1)},
            "cached_share": round(self.cached_share, 4),
            "cache": summary(self.counters()),
            "eta_s": None if eta is None else round(eta, 1),
        }

    def line(self) -> str:
        """The counters as people read them."""
        prompt_rate, output_rate = self.rates()
        parts = [f"prompt {prompt_rate:,.0f} tok/s", f"output {output_rate:,.0f} tok/s"]
        if self.reused:
            parts.append(f"cached {self.cached_share:.0%}")
        parts.append(f"ETA {clock_text(self.eta())}")
        return ", ".join(parts)


def clock_text(seconds: float | None) -> str:
    """1:02:03; a dash for not known."""
    if seconds is None:
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class View(Protocol):
    """Shows a Meter."""

    def update(self) -> None:
        """Called a few times a second."""

    def close(self) -> None:
        """Called once, at the end."""


class PlainView:
    """A line every PLAIN_EVERY seconds and one at the end."""

    def __init__(self, meter: ProgressMeter, stream: TextIO) -> None:
        self._meter = meter
        self._stream = stream
        self._last = meter.clock()

    def update(self) -> None:
        if self._meter.clock() - self._last >= PLAIN_EVERY:
            self._last = self._meter.clock()
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        meter = self._meter
        over = f"{meter.done + meter.failed}/{meter.total} lines, {meter.failed} failed"
        print(f"{over}, {meter.line()}", file=self._stream, flush=True)


class BarView:
    """A bar of rich's on a terminal."""

    def __init__(self, meter: ProgressMeter, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._meter = meter
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=stream), auto_refresh=False)
        self._task = self._bar.add_task("", total=meter.total, note="")
        self._bar.start()

    def update(self) -> None:
        meter = self._meter
        note = f"[red]{meter.failed} failed[/], {meter.line()}" if meter.failed else meter.line()
        self._bar.update(self._task, completed=meter.done + meter.failed, total=meter.total, note=note)
        self._bar.refresh()

    def close(self) -> None:
        self.update()
        self._bar.stop()


def make_view(meter: ProgressMeter, stream: TextIO | None = None) -> View:
    """A bar where someone can see it, else lines."""
    stream = stream or sys.stderr
    return BarView(meter, stream) if stream.isatty() else PlainView(meter, stream)
