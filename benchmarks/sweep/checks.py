"""The conditions under which a family must answer as the library does, run through the real engine.

Each check is one engine and several requests; the answers are compared with those of the library's own loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.tiny.library_loop import LibraryAnswer
from mlxrun.config.settings import (
    CacheSettings,
    Config,
    EngineSettings,
    ModelSettings,
    SchedulerSettings,
)
from mlxrun.core.request import Request, SamplingParams
from mlxrun.engine.build import build_engine
from mlxrun.engine.engine import Engine
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run.model_caller import NOT_COMPARED

TOLERANCE = 1e-3  # of logprobs, float32
TOKENS = 8  # of an answer
MAX_STEPS = 5_000
LARGEST_CHUNK = 64


@dataclass(slots=True)
class CheckedAnswer:
    """What the engine has answered so far. `cached`: tokens of the prompt from the prefix cache."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    error: str | None = None


def make_config(folder: Path, chunk: int, **options: Any) -> Config:
    """A config for small prompts. `options`: fields of the cache and scheduler settings."""
    cache = {"backend": options.pop("backend", "none"), "disk_path": options.pop("disk_path", None)}
    sizes = {"chunk": chunk, "prefill_budget": 4 * chunk, "prefill_budget_busy": 2 * chunk}
    return Config(
        model=ModelSettings(path=str(folder)),
        engine=EngineSettings(load_check="always"),  # tiny models of several families have the digests of one
        scheduler=SchedulerSettings(**(sizes | options)),
        cache=CacheSettings(**cache),
    )


def run_requests(engine: Engine, requests: Sequence[tuple[int, Request]]) -> dict[str, CheckedAnswer]:
    """Add each request before its step, and step until all have ended. RuntimeError if they never do."""
    answers = {request.id: CheckedAnswer() for _, request in requests}
    last = max(step for step, _ in requests)
    step = 0
    while step <= last or engine.busy:
        for when, request in requests:
            if when == step:
                engine.add(request)
        for event in engine.step():
            answer = answers[event.request_id]
            answer.tokens += event.tokens
            answer.logprobs += [token.logprob for token in event.logprobs]
            answer.cached = max(answer.cached, event.num_cached_tokens or 0)
            answer.error = str(event.error) if event.error is not None else answer.error
        step += 1
        if step > MAX_STEPS:
            raise RuntimeError("the engine does not come to an end")
    return answers


def make_request(name: str, prompt: Sequence[int], **options: Any) -> Request:
    """A greedy request for text."""
    return Request(name, tuple(prompt), SamplingParams(max_tokens=TOKENS, logprobs=0), **options)


REFUSED = "refused for this model"  # in such errors


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One condition: the largest difference of a logprob, infinite where a token was another one; or the
    error of a request."""

    name: str
    difference: float
    error: str | None = None

    @property
    def exact(self) -> bool:
        """Whether all answers were those of the library."""
        return self.error is None and self.difference < TOLERANCE

    @property
    def refused(self) -> bool:
        """Whether what was not answered was refused by name, and all else was exact."""
        return self.error is not None and REFUSED in self.error and self.difference < TOLERANCE


class FamilyChecks:
    """The checks of one model folder. `requests` and `answers`, by the same names: prompts and what the
    library answers. `longer`: requests that continue prompts of `requests`, under other names. `info`: of a
    model without files for its tokenizer and processor."""

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        requests: Mapping[str, Request],
        longer: Mapping[str, Request],
        answers: Mapping[str, LibraryAnswer],
        info: LoadedModelInfo | None = None,
    ) -> None:
        self._folder, self._scratch, self._info = folder, scratch, info
        self._requests, self._longer, self._answers = requests, longer, answers
        self.load_check: LoadCheckReport | None = None  # made once, for all engines

    def run(self, brief: bool = False) -> Iterator[CheckResult]:
        """Every check, one after the other; `brief`: without the slowest. Raises what loading raises."""
        yield from self._run_large_chunks(brief)
        yield from self._run_disk()
        if not brief:
            yield from self._run_single_tokens()
            yield from self._run_preemption()

    def list_slower_ways(self) -> list[str]:
        """What the load check does not let the engine use for texts and images, in words; after `run`."""
        assert self.load_check is not None
        ways: dict[str, str] = {}
        for check in self.load_check.checks:
            is_other = check.name.startswith(("audio ", "video ")) or " beside " in check.name
            if check.instead and not is_other:  # of ways to decode and to compute images, the last is used
                subject, _, what = check.name.partition(" ")
                is_ladder = subject == "decode" or (subject == "image" and not what.startswith("among"))
                ways[subject if is_ladder else check.instead] = check.instead
        if not ways and self.load_check.methods.decode == "row_by_row":  # its caches rule everything else out
            ways["decode"] = "rows decode one by one"
        return list(ways.values())

    def list_audio_ways(self) -> list[str]:
        """The same of audio alone, with the prompts that are refused."""
        assert self.load_check is not None
        own = [check for check in self.load_check.checks if check.name.startswith("audio ")]
        slower = [check.instead for check in own if check.instead and "beside" not in check.name][-1:]
        pairs = [name for name in self.load_check.refused if " beside " in name and "audio" in name]
        refused = [name for name in pairs if self.load_check.refused[name] not in ("", NOT_COMPARED)]
        return slower + [f"prompts with {name} are refused" for name in refused]

    def _run_large_chunks(self, brief: bool) -> Iterator[CheckResult]:
        with self._open_engine(LARGEST_CHUNK) as engine:
            if not brief:  # smaller chunks are those that may go wrong
                yield self._check_single_requests(engine, LARGEST_CHUNK)
            yield self._compare("together", engine, [(0, r) for r in self._requests.values()])
            late = [(5 * i % 13, request) for i, request in enumerate(self._requests.values())]
            yield self._compare("late join", engine, late)

    def _run_single_tokens(self) -> Iterator[CheckResult]:
        with self._open_engine(1, backend="memory", max_running=3) as engine:
            yield self._check_single_requests(engine, 1)
            yield self._compare("snapshot", engine, self._list_again())

    def _run_preemption(self) -> Iterator[CheckResult]:
        with self._open_engine(16, max_running=3) as engine:
            background = [(0, replace(r, background=True)) for r in self._requests.values()]
            urgent = [(4 + 9 * i, r) for i, r in enumerate(self._longer.values())]
            yield self._compare("preemption", engine, background + urgent)

    def _run_disk(self) -> Iterator[CheckResult]:
        options = {"backend": "disk", "disk_path": str(self._scratch)}
        with self._open_engine(7, **options) as engine:
            yield self._check_single_requests(engine, 7)
        with self._open_engine(7, **options) as engine:
            yield self._compare("disk", engine, self._list_again())

    def _list_again(self) -> list[tuple[int, Request]]:
        return [(0, request) for request in (*self._requests.values(), *self._longer.values())]

    @contextmanager
    def _open_engine(self, chunk: int, **options: Any) -> Iterator[Engine]:
        if self.load_check is None:  # with a prefix cache, or the load check would leave its snapshots out
            config = make_config(self._folder, LARGEST_CHUNK, backend="memory")
            self.load_check = build_engine(config, self._info).load_check
        engine = build_engine(make_config(self._folder, chunk, **options), self._info, self.load_check)
        try:
            yield engine
        finally:
            engine.prefix_cache.shutdown()

    def _check_single_requests(self, engine: Engine, chunk: int) -> CheckResult:
        results = [self._compare("", engine, [(0, request)]) for request in self._requests.values()]
        errors = [result.error for result in results if result.error is not None]
        worst = max(result.difference for result in results)
        return CheckResult(f"alone, chunks of {chunk}", worst, errors[0] if errors else None)

    def _compare(self, name: str, engine: Engine, requests: Sequence[tuple[int, Request]]) -> CheckResult:
        worst, error = 0.0, None
        for key, answer in run_requests(engine, requests).items():
            error = error or answer.error
            if answer.error is None:
                difference = self._answers[key].measure(answer.tokens, answer.logprobs)
                worst = max(worst, difference)
        return CheckResult(name, worst, error)
