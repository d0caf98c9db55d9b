"""The progress of a job: counters and rates, shown as a bar on a terminal and as lines in a pipe, on standard
error.

The remaining time is estimated from tokens, at the rates of this run so far. Counted are the tokens of
waiting lines and the missing ones of running lines. The clock is a parameter, so that tests need not wait.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from mlxrun.core.terminal import filter_streams, open_console, print_line
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run.job_cache import summarize_counters

WINDOW = 30.0  # seconds over which rates are taken
PLAIN_EVERY = 10.0
SURE_SECONDS, SURE_LINES = 5.0, 3  # of a run, before its remaining time is estimated
MORE = 0.5  # of its tokens so far, that an answer still gets which is about as long as the others, or longer
Clock = Callable[[], float]


@dataclass(slots=True)
class ProgressMeter:
    """Counters of one job. `total`: lines to be done; `lines`: lines in the job; the others count lines or
    tokens. `done`, `failed` and `total_*` include earlier runs; the others count this run. The meter is
    changed on the event loop only; another thread makes status.json from it."""

    clock: Clock
    total: int = 0
    lines: int = 0
    done: int = 0
    failed: int = 0
    total_prompt: int = 0
    total_output: int = 0
    run_done: int = 0
    run_failed: int = 0
    computed: int = 0
    reused: int = 0
    output: int = 0
    counters: Callable[[], Mapping[str, int]] = dict  # of the prefix cache
    drafts: Callable[[], Mapping[str, Any]] = dict  # what the engine drafted; nothing if it may not
    workers: Callable[[], list[dict[str, Any]]] = list  # of a job whose engines are in other processes
    _running: dict[int, LineTokens] = field(default_factory=dict)  # tokens of lines under way, by identity
    _prepared: tuple[int, int, int] = (0, 0, 0)  # tokenised lines, their prompt tokens and max_tokens
    _answered: tuple[int, int] = (0, 0)  # answered lines, their output tokens
    _started: float | None = None
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)

    @property
    def running(self) -> int:
        """The number of running lines."""
        return len(self._running)

    @property
    def seconds(self) -> float:
        """The seconds since the first line of this run was tokenized."""
        return 0.0 if self._started is None else self.clock() - self._started

    def start_line(self, tokens: LineTokens) -> None:
        """Count a line as running. `tokens`: its tokens so far."""
        self._running[id(tokens)] = tokens

    def stop_line(self, tokens: LineTokens) -> None:
        """Count a line as not running any more."""
        self._running.pop(id(tokens), None)

    def add_prompt(self, prompt: int, max_tokens: int) -> None:
        """Count a tokenized line."""
        lines, prompts, most = self._prepared
        self._prepared = lines + 1, prompts + prompt, most + max_tokens
        self._take_sample()

    def add_tokens(self, computed: int, reused: int, output: int) -> None:
        """Count prompt tokens that were computed or reused, and output tokens."""
        self._take_sample()
        self.computed += computed
        self.reused += reused
        self.output += output

    def _take_sample(self) -> None:
        """Remember the counters once a second, for `compute_rates`."""
        now = self.clock()
        if self._started is None:
            self._started = now
        if not self._samples or now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, self.computed, self.output))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW:
            self._samples.popleft()

    def finish_line(self, failed: bool, prompt: int, output: int) -> None:
        """Count a finished line."""
        self.done += not failed
        self.failed += failed
        self.run_done += not failed
        self.run_failed += failed
        self.total_prompt += prompt
        self.total_output += output
        if not failed:
            self._answered = self._answered[0] + 1, self._answered[1] + output

    def compute_rates(self) -> tuple[float, float]:
        """Compute prompt and output tokens a second, over the last WINDOW seconds."""
        now, samples = self.clock(), list(self._samples)
        if not samples:
            return 0.0, 0.0
        old = (sample for sample in reversed(samples) if now - sample[0] >= WINDOW)
        then, computed, output = next(old, samples[0])
        span = now - then
        if span <= 0:
            return 0.0, 0.0
        return (self.computed - computed) / span, (self.output - output) / span

    def estimate_eta(self) -> float | None:
        """Estimate the seconds until the job is finished. None until this run has lasted SURE_SECONDS and has
        answered SURE_LINES: before, it has hardly decoded. Prompt tokens and output tokens have a rate each,
        and the slower kind counts. A prompt token takes a small part of the time of an output token. A
        running answer may end at once or become long: see MORE."""
        if self.total and self.done + self.failed >= self.total:
            return 0.0
        lines, prompts, _ = self._prepared
        lasted = self.seconds
        if lasted < SURE_SECONDS or self._answered[0] < SURE_LINES or not lines:
            return None
        running = list(self._running.values())
        outputs = [tokens.output for tokens in running]
        prompt, answer = prompts / lines, self._average_answer(outputs)
        waiting = max(0, self.total - self.done - self.failed - len(running))
        unread = sum(max(0.0, prompt - tokens.computed - tokens.reused) for tokens in running)
        to_compute = (waiting * prompt + unread) * (1 - self.cached_share)
        to_write = waiting * answer + sum(max(answer - output, MORE * output) for output in outputs)
        kinds = ((to_compute, self.computed), (to_write, self.output))
        return max(todo * lasted / spent if spent else 0.0 for todo, spent in kinds)

    def _average_answer(self, under_way: list[int]) -> float:
        """The tokens of an average answer, from the answers so far and those under way that will be longer:
        where lengths differ much, nearly all that have ended are short."""
        answers, tokens = self._answered
        longer = [(1 + MORE) * output for output in under_way if output > tokens / answers]
        return (tokens + sum(longer)) / (answers + len(longer))

    def freeze_counters(self) -> None:
        """Copy the counters of the prefix cache and of drafts, because the engine is about to be closed."""
        last, drafts = dict(self.counters()), dict(self.drafts())
        self.counters, self.drafts = lambda: last, lambda: drafts

    @property
    def cached_share(self) -> float:
        """The share of this run's prompt tokens that were not computed."""
        prompt = self.computed + self.reused
        return self.reused / prompt if prompt else 0.0

    def build_status(self) -> dict[str, Any]:
        """Build the progress as status.json contains it."""
        prompt_rate, output_rate = self.compute_rates()
        eta = self.estimate_eta()
        return {
            "lines": self.lines,
            "total": self.total,
            "done": self.done,
            "failed": self.failed,
            "running": self.running,
            "tokens": {"computed": self.computed, "reused": self.reused, "output": self.output},
            "rates": {"prompt": round(prompt_rate, 1), "output": round(output_rate, 1)},
            "cached_share": round(self.cached_share, 4),
            "cache": summarize_counters(self.counters()),
            "eta_s": None if eta is None else round(eta, 1),
            **({"workers": found} if (found := self.workers()) else {}),
        }

    def format_done(self) -> str:
        """Format how many lines are done: `3 of 8 lines`, or `3 of the first 5 lines (the job has 8)`."""
        if self.total == self.lines:
            return f"{self.done} of {pluralize(self.total, 'line')}"
        first = f"the first {self.total} lines" if self.total > 1 else "1 line"
        return f"{self.done} of {first} (the job has {self.lines})"

    def format_line(self) -> str:
        """Format the rates and the remaining time, for people."""
        prompt_rate, output_rate = self.compute_rates()
        parts = [f"prompt {prompt_rate:,.0f} tok/s", f"output {output_rate:,.0f} tok/s"]
        if self.reused:
            parts.append(f"cached {self.cached_share:.0%}")
        if workers := self.workers():
            running = sum(worker["state"] == "running" for worker in workers)
            parts.append(f"{running} of {pluralize(len(workers), 'worker')}")
        parts.append(f"ETA {format_duration(self.estimate_eta())}")
        return ", ".join(parts)


def pluralize(number: int, noun: str) -> str:
    """`1 line`, `2 lines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_now(precision: str = "seconds") -> str:
    """Format the current time in UTC, as the files of a job have it."""
    return datetime.now(UTC).isoformat(timespec=precision)


def format_duration(seconds: float | None) -> str:
    """Format seconds as 1:02:03; None as a dash."""
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
    """Prints a line every PLAIN_EVERY seconds, and one at the end. `title`: stands before each line; a view
    with a title prints no last line, as its caller reports how the job ended."""

    def __init__(self, meter: ProgressMeter, stream: TextIO, title: str = "") -> None:
        self._meter = meter
        self._title = title and f"{title}: "
        self._stream = stream
        self._last = meter.clock()

    def update(self) -> None:
        if self._meter.clock() - self._last >= PLAIN_EVERY:
            self._last = self._meter.clock()
            self._print()

    def close(self) -> None:
        if not self._title:
            self._print()

    def _print(self) -> None:
        meter = self._meter
        over = f"{self._title}{meter.done + meter.failed}/{meter.total} lines, {meter.failed} failed"
        print_line(f"{over}, {meter.format_line()}", self._stream)


class BarView(ProgressView):
    """Shows a progress bar on a terminal. `title`: stands before it."""

    def __init__(self, meter: ProgressMeter, stream: TextIO, title: str = "") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._meter = meter
        name = [TextColumn("{task.description}", markup=False)] if title else []
        note = TextColumn("{task.fields[note]}")
        columns = (*name, BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())
        self._bar = Progress(*columns, console=open_console(stream), auto_refresh=False)
        self._task = self._bar.add_task(title, total=meter.total, note="")
        self._bar.start()
        self._filter = filter_streams()  # before rich's own stand-ins, which would take styles from a text
        self._filter.__enter__()

    def update(self) -> None:
        meter = self._meter
        note = (
            f"[red]{meter.failed} failed[/], {meter.format_line()}" if meter.failed else meter.format_line()
        )
        self._bar.update(self._task, completed=meter.done + meter.failed, total=meter.total, note=note)
        self._bar.refresh()

    def close(self) -> None:
        super().close()
        self._filter.__exit__(None, None, None)
        self._bar.stop()


def make_view(meter: ProgressMeter, stream: TextIO | None = None, title: str = "") -> ProgressView:
    """Make a bar if the stream (default: standard error) is a terminal, else lines. `title`: the job's name,
    if there are several."""
    stream = stream or sys.stderr
    return BarView(meter, stream, title) if stream.isatty() else PlainView(meter, stream, title)
