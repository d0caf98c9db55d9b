"""The progress of a job: counters and rates, shown as a bar on a terminal and as lines in a pipe.

Progress goes to standard error. The remaining time is estimated from tokens: the lines left times the average
prompt and answer, at the rate so far. The clock is a parameter, so that tests need not wait.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from mlxrun.batch.job_cache import summarize_counters

WINDOW = 30.0  # seconds over which rates are taken
PLAIN_EVERY = 10.0
Clock = Callable[[], float]


@dataclass(slots=True)
class ProgressMeter:
    """Counters of one job. `done`, `failed` and `total_*` include earlier runs; the others count this run."""

    clock: Clock
    total: int = 0
    done: int = 0
    failed: int = 0
    total_prompt: int = 0
    total_output: int = 0
    run_done: int = 0
    run_failed: int = 0
    running: int = 0
    computed: int = 0
    reused: int = 0
    output: int = 0
    counters: Callable[[], Mapping[str, int]] = dict  # of the prefix cache
    _finished_tokens: int = 0  # tokens of finished lines, answered or failed
    _prepared: tuple[int, int, int] = (0, 0, 0)  # tokenised lines, their prompt tokens and max_tokens
    _answered: tuple[int, int] = (0, 0)  # answered lines, their output tokens
    _started: float | None = None
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add_prompt(self, prompt: int, max_tokens: int) -> None:
        """Count a line that was tokenised."""
        lines, prompts, most = self._prepared
        self._prepared = lines + 1, prompts + prompt, most + max_tokens

    def add_tokens(self, computed: int, reused: int, output: int) -> None:
        """Count prompt tokens that were computed or reused, and output tokens."""
        if self._started is None:
            self._started = self.clock()
        self.computed += computed
        self.reused += reused
        self.output += output

    def finish_line(self, failed: bool, prompt: int, output: int, spent: int) -> None:
        """Count a finished line; `spent`: all its tokens that `add_tokens` has counted."""
        self.done += not failed
        self.failed += failed
        self.run_done += not failed
        self.run_failed += failed
        self.total_prompt += prompt
        self.total_output += output
        self._finished_tokens += spent
        if not failed:
            self._answered = self._answered[0] + 1, self._answered[1] + output

    def compute_rates(self) -> tuple[float, float]:
        """Prompt and output tokens a second, over the last WINDOW seconds. Call it regularly."""
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

    def estimate_eta(self) -> float | None:
        """Seconds until the job is finished; None while they cannot be estimated."""
        lines, prompts, most = self._prepared
        spent = self.computed + self.reused + self.output
        if self._started is None or not lines or not spent:
            return None
        elapsed = self.clock() - self._started
        answers = self._answered[1] / self._answered[0] if self._answered[0] else most / lines
        todo = max(0, self.total - self.done - self.failed) * (prompts / lines + answers)
        return max(0.0, todo - (spent - self._finished_tokens)) * elapsed / spent

    def freeze_counters(self) -> None:
        """Copy the counters of the prefix cache, because the engine is about to be closed."""
        last = dict(self.counters())
        self.counters = lambda: last

    @property
    def cached_share(self) -> float:
        """Share of this run's prompt tokens that were not computed."""
        prompt = self.computed + self.reused
        return self.reused / prompt if prompt else 0.0

    def build_status(self) -> dict[str, Any]:
        """The progress as status.json contains it."""
        prompt_rate, output_rate = self.compute_rates()
        eta = self.estimate_eta()
        return {
            "total": self.total,
            "done": self.done,
            "failed": self.failed,
            "running": self.running,
            "tokens": {"computed": self.computed, "reused": self.reused, "output": self.output},
            "rates": {"prompt": round(prompt_rate, 1), "output": round(output_rate, 1)},
            "cached_share": round(self.cached_share, 4),
            "cache": summarize_counters(self.counters()),
            "eta_s": None if eta is None else round(eta, 1),
        }

    def format_line(self) -> str:
        """The rates and the remaining time, for people."""
        prompt_rate, output_rate = self.compute_rates()
        parts = [f"prompt {prompt_rate:,.0f} tok/s", f"output {output_rate:,.0f} tok/s"]
        if self.reused:
            parts.append(f"cached {self.cached_share:.0%}")
        parts.append(f"ETA {format_duration(self.estimate_eta())}")
        return ", ".join(parts)


def format_duration(seconds: float | None) -> str:
    """Seconds as 1:02:03; a dash for None."""
    if seconds is None:
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class ProgressView:
    """Shows a meter. `update` is called several times a second, `close` once at the end."""

    def update(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.update()


class PlainView(ProgressView):
    """Prints a line every PLAIN_EVERY seconds and one at the end."""

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
        print(f"{over}, {meter.format_line()}", file=self._stream, flush=True)


class BarView(ProgressView):
    """Shows a progress bar on a terminal."""

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
        note = (
            f"[red]{meter.failed} failed[/], {meter.format_line()}" if meter.failed else meter.format_line()
        )
        self._bar.update(self._task, completed=meter.done + meter.failed, total=meter.total, note=note)
        self._bar.refresh()

    def close(self) -> None:
        super().close()
        self._bar.stop()


def make_view(meter: ProgressMeter, stream: TextIO | None = None) -> ProgressView:
    """A bar if the stream is a terminal, else lines."""
    stream = stream or sys.stderr
    return BarView(meter, stream) if stream.isatty() else PlainView(meter, stream)
