"""Runs jobs without a model: an engine that echoes, and short cuts to write, run and read a job.

The answer to a prompt depends on the prompt and the seed alone: the last user message (or the prompt), then
two letters sampled by the seed; its logprobs too, by position, and those of the prompt by the prompt. Tokens
in `prior_output` are checked and not sent again. A message may request an error: see `TROUBLE`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlxrun.jobs.run.line_runner
from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import BatchSettings, Config, MediaSettings, SchedulerSettings
from mlxrun.core.errors import EngineDead, MlxrunError, Overloaded, PromptTooLong
from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent, TokenLogprob
from mlxrun.jobs.lines.job_file import NO_SCORERS
from mlxrun.jobs.records.output_records import BatchStamp
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobOutcome, JobRun, JobSetup
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.progress import make_view
from mlxrun.jobs.run.stop_signals import StopSignals
from mlxrun.jobs.scoring.eval_spec import EvalReader
from tests.helpers.prompt_scores import make_prompt_logprobs
from tests.helpers.tokenizers import FakeModelInfo, byte_tokenizer

# The first word of a prompt, and the error that the engine then raises.
TROUBLE = {
    "BUSY": Overloaded,
    "LONG": PromptTooLong,
    "DEAD": EngineDead,
    "BROKEN": MlxrunError,
    "BUG": KeyError,
}


class FakeClient:
    """An engine that echoes. `pause` is the longest sleep between two tokens; tries are counted by text."""

    def __init__(self, model_info: FakeModelInfo, pause: float = 0.0, tokens: Path | None = None) -> None:
        self.model_info = model_info
        self.pause = pause
        self.tries: Counter[str] = Counter()
        self.busy = 0
        self.most = 0
        self.aborted = 0
        self.closed = False
        self.start_takes = 0.0
        self.output = 0  # tokens that were computed
        self.tokens = tokens  # file with a byte for each of them
        self.answered: dict[str, int] = {}  # number of tokens in prior_output, by text, where there were any
        self.counts: Counter[str] = Counter()
        self.waits: Callable[[str], bool] = lambda text: False  # before a token of the answer to this text

    def stop_after(self, output: int) -> None:
        """Wait once so many tokens are computed, until `waits` is another one."""
        self.waits = lambda text: self.output >= output

    def go_on(self) -> None:
        """Wait no more."""
        self.waits = lambda text: False

    async def start(self) -> FakeClient:
        await asyncio.sleep(self.start_takes)
        return self

    async def close(self) -> None:
        self.closed = True

    def read_cache_counters(self) -> Mapping[str, int]:
        return self.counts

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        text = find_text(request)
        self.tries[text] += 1
        if request.prior_output:
            self.answered[text] = len(request.prior_output)
        self.counts["miss"] += 1
        word = get_first_word(text)
        if word in TROUBLE and (word != "BUSY" or self.tries[text] <= int(text.split(" ")[1])):
            raise TROUBLE[word](f"the engine got {text!r}")
        self.busy += 1
        self.most = max(self.most, self.busy)
        over = False
        try:
            async for event in self.answer_body(request, text):
                over = event.finish is not None
                yield event
        finally:
            self.busy -= 1
            self.aborted += not over

    async def answer_body(self, request: Request, text: str) -> AsyncGenerator[TokenEvent, None]:
        rng = random.Random(request.params.seed)
        answer = text + "".join(rng.choices("xyz", k=2))
        ids = byte_tokenizer()(answer, add_special_tokens=False)["input_ids"][: request.params.max_tokens]
        known, middle = len(request.prior_output), len(request.prompt) // 2
        assert tuple(ids[:known]) == request.prior_output, "these tokens are not of this answer"
        scores = make_prompt_logprobs(request)
        yield TokenEvent(
            request.id, num_computed_tokens=middle, hit_kind=HitKind.MISS, prompt_logprobs=scores[:middle]
        )
        if scores[middle:]:
            yield TokenEvent(request.id, num_computed_tokens=middle, prompt_logprobs=scores[middle:])
        for at, token in list(enumerate(ids))[known:]:
            await asyncio.sleep(random.random() * self.pause)
            while self.waits(text):
                await asyncio.sleep(0.001)
            self.output += 1
            if self.tokens is not None:
                with self.tokens.open("ab") as file:
                    file.write(b".")
            yield TokenEvent(request.id, (token,), make_logprobs(request, at, token), len(request.prompt))
            breaks = get_first_word(text) == "PARTIAL" and self.tries[text] == 1
            if breaks and at + 1 == int(text.split(" ")[1]):
                raise Overloaded("in the middle of it")
        cut = len(ids) == request.params.max_tokens
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        stop_id = None if cut else min(request.params.stop_ids, default=None)
        size = len(request.prompt)
        yield TokenEvent(request.id, num_computed_tokens=size, finish=finish, stop_id=stop_id)


def get_first_word(text: str) -> str:
    return text.split(" ")[0]


def make_logprobs(request: Request, at: int, token: int) -> tuple[TokenLogprob, ...]:
    """Numbers with all their digits, by seed and position."""
    if request.params.logprobs is None:
        return ()
    rng = random.Random(f"{request.params.seed} {at}")
    numbers = sorted((-rng.expovariate(0.1) for _ in range(request.params.logprobs)), reverse=True)
    return (TokenLogprob(-rng.random() / 3, tuple((65 + i, p) for i, p in enumerate(numbers))),)


def find_text(request: Request) -> str:
    """The last user message of a request, or its raw prompt."""
    text = byte_tokenizer().decode(list(request.prompt), skip_special_tokens=False)
    users = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    return users[-1] if users else text.removeprefix("<|begin|>")


def chat(custom_id: str, text: str, wanted: Any = None, **params: Any) -> dict[str, Any]:
    """A job line in OpenAI's form."""
    body = {"messages": [{"role": "user", "content": text}], **params}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return line | ({"eval": wanted} if wanted is not None else {})


def chats(count: int) -> list[dict[str, Any]]:
    """Many small lines, some scored."""
    return [
        chat(f"line-{i}", f"say {i}", {"expected": f"say {i}", "match": "contains", "group": f"g{i % 2}"})
        for i in range(count)
    ]


# A good line, six others of which four are not valid, and one that the engine refuses.
MIXED = [
    chat("good", "hello", {"expected": "hello", "match": "contains", "group": "a"}),
    "this is not JSON",
    chat("good", "again"),
    chat("param", "hello", temprature=1),
    chat("long", "LONG 1", {"expected": "x", "group": "a"}),
    {"id": "short", "prompt": "once", "max_tokens": 3},
    {**chat("url", "hello"), "url": "/v1/moderations"},
]


def write_job(folder: Path, lines: Sequence[Any], name: str = "job.jsonl") -> Path:
    """A job file of objects, or of strings as they are."""
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if it is not there."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def by_id(path: Path) -> dict[str, bytes]:
    """The lines of a file by custom_id; each may be there once."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = {json.loads(line)["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a line is there twice"
    return found


def make_config(**batch: Any) -> Config:
    rows = batch.pop("rows", 4)
    return Config(
        scheduler=SchedulerSettings(max_running=rows),
        media=MediaSettings(),
        batch=BatchSettings(**batch),
    )


@dataclass
class Bench:
    """Runs one job file again and again."""

    job: Path
    config: Config = field(default_factory=make_config)
    model_info: FakeModelInfo = field(default_factory=FakeModelInfo)
    said: list[str] = field(default_factory=list)
    client: FakeClient = field(init=False)
    no_sleep: bool = False  # tries follow at once
    tokens: Path | None = None
    stamp: BatchStamp | None = None  # of the server's batch that the job belongs to
    device: dict[str, Any] = field(default_factory=lambda: {"name": "fake"})
    evals: EvalReader = NO_SCORERS
    prepare: Callable[[FakeClient], object] = lambda client: None  # called with the engine of each run
    stop: StopSignals = field(init=False)  # of the last run

    def __post_init__(self) -> None:
        self.client = FakeClient(self.model_info)

    @property
    def paths(self) -> JobPaths:
        return JobPaths(self.job)

    async def run(self, **options: Any) -> JobOutcome:
        """One run; `client` is the engine it had, `said` its messages to the user."""
        self.client = FakeClient(self.model_info, self.client.pause, self.tokens)
        self.prepare(self.client)
        self.said.clear()
        setup = self.make_setup()
        with open(os.devnull, "w") as nowhere:
            view = partial(make_view, stream=nowhere)
            self.stop = StopSignals(self.said.append)
            run = JobRun(self.paths, setup, JobOptions(**options), self.said.append, self.stop, view)
            if self.no_sleep:
                run.backoff = 0.0
            return await run.run()

    def make_setup(self) -> JobSetup:
        """What the job runs on; `client` is the engine."""
        preparer = LinePreparer(self.model_info, self.config, self.job.parent).for_batch(self.stamp, None)
        digest, start = hash_config(self.config), self.client.start
        return JobSetup(
            self.config, digest, self.model_info, preparer, start, lambda: self.device, evals=self.evals
        )

    @property
    def ran(self) -> int:
        """Requests that the engine of the last run saw."""
        return sum(self.client.tries.values())


async def finish_job(folder: Path) -> Bench:
    """A job with 12 good lines and 2 failed ones, run to its end."""
    bench = Bench(write_job(folder, [*chats(12), "bad", chat("long", "LONG")]))
    assert (await bench.run()).exit_code == 1
    return bench


def edit_line(path: Path, line: int, change: Callable[[bytes], bytes]) -> None:
    """Change one line of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = change(lines[line])
    path.write_bytes(b"".join(lines))


def run_in_process(
    job: Path,
    pause: float,
    order: str = "completion",
    write_every: float | None = None,
    stop_after: int | None = None,
) -> None:
    """For a process of its own, which may be killed: ends with the job's exit code. `stop_after`: tokens,
    after which it waits for its end."""
    if write_every is not None:
        mlxrun.jobs.run.line_runner.WRITE_EVERY = write_every
    bench = Bench(job, make_config(order=order, rows=4))
    bench.client.pause = pause
    bench.tokens = job.with_suffix(".tokens")
    if stop_after is not None:
        bench.prepare = lambda client: client.stop_after(stop_after)
    try:
        outcome = asyncio.run(bench.run())
    except MlxrunError as error:
        job.with_suffix(".said").write_text(str(error))
        raise SystemExit(error.exit_code) from error
    raise SystemExit(outcome.exit_code)
