"""Jobs of long prompts that are killed again and again: the same bytes, and little is computed twice.

Each run is a `mlxrun batch` in a process of its own, ended by SIGKILL at a random moment: while it loads,
prefills or decodes. A kill that comes late never comes after the end: some steps later the process waits for
it. Checkpoints are written at once, since what a kill costs is not to depend on how far the writer lags. The
process logs what its runner was told to compute, so that what a kill costs is counted row by row and to the
token: of a killed run the manifest knows what status.json last said.

The bound. One row, killed: at most `checkpoint_every` + one chunk of its prompt is computed again, whether it
was prefilling or decoding; rows that had not begun lose nothing.
"""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers import text_models, vision_models
from tests.helpers.batch_fakes import Bench, chat, write_job
from tests.helpers.model_fixtures import Zoo, mark_sweep

CHUNK, EVERY = 64, 256
BOUND = EVERY + CHUNK
ROWS = 3
LATE = 4  # steps
PATIENCE = 240.0
SETTINGS = {
    "model.context_length": 20_000,
    "scheduler.chunk": CHUNK,
    "scheduler.prefill_budget": 8 * CHUNK,
    "scheduler.max_running": ROWS,
    "cache.checkpoint_every": EVERY,
    "batch.order": "input",
}
CHILD = """
import hashlib, json, os, signal, sys, time
from mlxrun.engine.prefix_cache.disk_tier import DiskTier
from mlxrun.cli.main import main
from mlxrun.model.run.runner import ModelRunner

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
left = int(sys.argv[2])
execute, write, names = ModelRunner.execute, DiskTier.write, {}

def write_now(tier, entry, payload):
    accepted = write(tier, entry, payload)
    while entry.key in tier._pending:
        time.sleep(0.001)
    return accepted

def logged(runner, plan):
    global left
    if left == 0:
        signal.pause()
    left -= 1
    for one in plan.admit:
        request = one.request
        what = repr((request.prompt, request.image_digests, request.params.seed)).encode()
        names[request.id] = hashlib.sha256(what).hexdigest()[:16]
    result = execute(runner, plan)
    assert not result.invalid_hits, result.invalid_hits
    sizes = [(names[one.request.id], len(one.request.prompt)) for one in plan.admit]
    chunks = [(names[chunk.request_id], chunk.start, chunk.stop) for chunk in plan.prefill]
    step = {"admit": sizes, "prefill": chunks, "decode": len(plan.decode)}
    os.write(log, json.dumps(step).encode() + b"\\n")
    return result

ModelRunner.execute, DiskTier.write = logged, write_now
sys.exit(main(sys.argv[3:]))
"""


@dataclass
class Job:
    """One job file and the processes that run it; `costs` are the tokens that each row computed again."""

    path: Path
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)  # in which phase
    costs: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens, of all runs
    made: int = 0  # steps
    _read: int = 0  # bytes of the log
    prompts: dict[str, int] = field(default_factory=dict)  # and their sizes
    _reached: dict[str, int] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def paths(self) -> JobPaths:
        return JobPaths(self.path)

    @property
    def log(self) -> Path:
        return self.path.with_suffix(".steps")

    def start(self, kill_after: int | None = None) -> None:
        """Start a run, which waits for its kill some steps after `kill_after`; None: it runs to its end."""
        most = -1 if kill_after is None else kill_after + LATE
        settings = {"model.path": str(self.model), **SETTINGS, **self.settings}
        sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-c", CHILD, str(self.log), str(most), "batch", str(self.path), *sets]
        with self.path.with_suffix(".said").open("ab") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said)

    def finish(self) -> int:
        """Wait for the exit code."""
        assert self._process is not None
        code = self._process.wait(PATIENCE)
        self._count()
        return code

    def kill_after(self, steps: int, pause: float, most: float = PATIENCE) -> None:
        """Kill the process `pause` seconds after so many steps, for which it waits at most `most` seconds."""
        assert self._process is not None
        until = time.monotonic() + most
        while len(self.steps()) < steps and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(pause)
        self.stop()
        if self._process.returncode == -9:
            self.kills.append(self._phase())
        self._count()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps that this run has logged so far."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self._read)
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.paths.manifest.read_text())
        return found

    def _phase(self) -> str:
        steps = self.steps()
        if not steps:
            return "load"
        prefill, decode = steps[-1]["prefill"], steps[-1]["decode"]
        return "both" if prefill and decode else "prefill" if prefill else "decode"

    def _count(self) -> None:
        """Read the log of the run that has ended, and count what was computed again."""
        first, top = dict[str, int](), dict[str, int]()
        for step in self.steps():
            self.made += 1
            self.prompts.update(step["admit"])
            for row, start, stop in step["prefill"]:
                size = self.prompts[row]
                first.setdefault(row, start)
                top[row] = max(top.get(row, 0), min(stop, size))
                self.computed += max(0, min(stop, size) - start)
        for row, start in first.items():
            if row in self._reached:
                self.costs.append(max(0, self._reached[row] - start))
        for row, stop in top.items():
            self._reached[row] = max(self._reached.get(row, 0), stop)
        self._read = self.log.stat().st_size if self.log.exists() else 0


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Makes jobs, none of whose processes outlives the test."""
    made: list[Job] = []
    yield made
    for job in made:
        job.stop()


# -- what is asked ----------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0, "n": 2},
    {"temperature": 0.7},
]
# Numbers in the last digits of which it shows how rows were computed together: see `same_but_digits`.
LOGPROBS: dict[str, dict[str, Any]] = {
    "text": {"logprobs": 2},
    "vision": {"logprobs": True, "top_logprobs": 2},
}


def texts(count: int, most: int) -> list[dict[str, Any]]:
    """Return prompts of 1,500 to `most` token ids; one begins like another."""
    lengths = [1500 + i * (most - 1500) // (count - 1) for i in range(count)]
    prompts = text_models.prompts(count, lengths)
    prompts[1][:1000] = prompts[0][:1000]
    return [
        {"id": f"t{i}", "prompt": ids, "max_tokens": 30 + 5 * i, **KINDS[i % len(KINDS)]}
        for i, ids in enumerate(prompts)
    ]


def chats(count: int, most: int) -> list[dict[str, Any]]:
    """Chats of up to `most` tokens; all but each third with images in the middle of the text."""
    rng = random.Random(count)
    lines = []
    for i in range(count):
        words = "".join(rng.choices("abcdefgh ", k=1500 + i * (most - 1500) // (count - 1)))
        parts: list[dict[str, Any]] = [{"type": "text", "text": words[: 300 + 200 * i]}]
        for image in vision_models.images(i, i % 3):
            parts.append({"type": "image_url", "image_url": {"url": data_url(image)}})
        parts.append({"type": "text", "text": words[300 + 200 * i :]})
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 30 + 5 * i}
        lines.append({"id": f"v{i}", **body, **KINDS[i % len(KINDS)]})
    return lines


def data_url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# -- the check --------------------------------------------------------------------------------------


def killed_often(whole: Job, job: Job, times: int, rng: random.Random) -> None:
    """Run `whole` without and `job` with so many kills; check the bound for every row."""
    whole.start()
    assert whole.finish() == 0
    share = whole.made // times
    for number in range(times):
        if number % 5 == 1:
            job.start(1)
            job.kill_after(1, 0.0, most=rng.random() * 2.5)
        else:
            steps = rng.randint(1, max(1, 3 * share // 2))
            job.start(steps)
            job.kill_after(steps, rng.random() * 0.03)
    job.start()
    assert job.finish() == 0
    check_bound(whole, job)


def check_bound(whole: Job, job: Job) -> None:
    """Check the cost of each row and in all, and what the manifests say about it."""
    assert all(cost <= BOUND for cost in job.costs), job.costs
    # Rows that a kill has parted may reuse what they would have computed beside each other.
    least = whole.computed - len(job.kills) * BOUND
    assert least <= job.computed <= whole.computed + len(job.kills) * ROWS * BOUND
    runs, once = job.manifest()["runs"], whole.manifest()["runs"]
    # The manifest counts the last token of a prompt too, which the first decode step takes.
    answers = len(whole.prompts)
    assert [run["computed"] <= whole.computed + answers for run in once] == [True]
    assert once[0]["computed"] >= whole.computed
    said = sum(run["computed"] for run in runs)
    assert said <= once[0]["computed"] + len(job.kills) * ROWS * BOUND
    assert said <= job.computed + answers * (1 + len(job.kills))
    assert not job.paths.cache.exists() and not job.paths.answers.exists()


def numbers(value: Any) -> Iterator[float]:
    """Return the floats of a line, which are its logprobs."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from numbers(value[name])
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)


def same_bytes(whole: Job, job: Job) -> None:
    assert job.paths.out.read_bytes() == whole.paths.out.read_bytes()


def same_but_digits(whole: Job, job: Job) -> None:
    """Lines with logprobs differ in no more than their last digits, all others in nothing: without
    `engine.reproducible`, float32 sums depend on which rows were computed together."""
    ours, theirs = (one.paths.out.read_bytes().splitlines() for one in (job, whole))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if b'"top_logprobs"' not in other:
            assert mine == other
            continue
        found, wanted = list(numbers(json.loads(mine))), list(numbers(json.loads(other)))
        assert found == pytest.approx(wanted, abs=1e-4)
        assert texts_of(mine) == texts_of(other)


def texts_of(line: bytes) -> list[str]:
    choices = json.loads(line)["response"]["body"]["choices"]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def pair(jobs: list[Job], folder: Path, model: Path, lines: Sequence[Any], **settings: Any) -> list[Job]:
    """Return the same job twice."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    jobs += [Job(write_job(folder, lines, f"{name}.jsonl"), model, named) for name in ("whole", "job")]
    return jobs


def make(zoo: Zoo, kind: str, family: str, count: int, most: int) -> tuple[Path, list[dict[str, Any]]]:
    lines = (texts if kind == "text" else chats)(count, most)
    lines[-1] |= LOGPROBS[kind]
    return (zoo.text if kind == "text" else zoo.vision)(family), lines


# -- the tests --------------------------------------------------------------------------------------

MODELS = [("text", "llama"), ("text", "qwen3_next"), ("vision", "qwen3_vl")]


@pytest.mark.parametrize(("kind", "family"), mark_sweep(MODELS[1:], MODELS[1:2]))
def test_some_kills(zoo: Zoo, tmp_path: Path, jobs: list[Job], kind: str, family: str) -> None:
    """Three kills: while it loads, while it prefills and later."""
    model, lines = make(zoo, kind, family, 3, 2200)
    whole, job = pair(jobs, tmp_path, model, lines)
    killed_often(whole, job, 3, random.Random(family))
    assert len(job.kills) == 3
    same_but_digits(whole, job)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "family"), [*MODELS, ("text", "gemma3_text"), ("vision", "qwen3_5")])
def test_twenty_kills(zoo: Zoo, tmp_path: Path, jobs: list[Job], kind: str, family: str) -> None:
    """The kills are at random moments."""
    model, lines = make(zoo, kind, family, 6, 4000)
    whole, job = pair(jobs, tmp_path, model, lines)
    killed_often(whole, job, 20, random.Random())
    print(figures(whole, job))
    assert len(job.kills) >= 18  # the last ones may come after the end
    same_but_digits(whole, job)


@pytest.mark.sweep
def test_reproducible_jobs_are_equal_to_the_last_digit(zoo: Zoo, tmp_path: Path, jobs: list[Job]) -> None:
    """With logprobs in every line, answers begin anew and prompts go on."""
    lines = [line | LOGPROBS["text"] | {"max_tokens": 120} for line in texts(4, 2200)]
    whole, job = pair(jobs, tmp_path, zoo.text("llama"), lines, engine__reproducible="true")
    killed_often(whole, job, 6, random.Random())
    print(figures(whole, job))
    same_bytes(whole, job)


def test_a_kill_in_a_prompt_of_8k_tokens(zoo: Zoo, tmp_path: Path, jobs: list[Job]) -> None:
    """After a kill at most `checkpoint_every` + one chunk are computed again."""
    prompt = text_models.prompts(16, [8192])[0]
    lines = [{"id": "long", "prompt": prompt, "max_tokens": 8, "temperature": 0}]
    sizes = {"scheduler__chunk": 256, "scheduler__prefill_budget": 4096, "cache__checkpoint_every": 1024}
    _, job = pair(jobs, tmp_path, zoo.text("llama"), lines, **sizes)
    job.start(18)
    job.kill_after(18, 0.0)
    assert job.kills == ["prefill"]
    done = job.computed
    assert 18 * 256 <= done < 8000
    job.start()
    assert job.finish() == 0
    assert job.computed - 8191 <= 1024 + 256
    last = job.manifest()["runs"][-1]
    assert last["computed"] + last["reused"] == 8192
    assert last["computed"] <= 8192 - done + 1024 + 256


def figures(whole: Job, job: Job) -> str:
    """What a run by hand is for."""
    manifest = sum(run["computed"] for run in job.manifest()["runs"])
    phases = {phase: job.kills.count(phase) for phase in sorted(set(job.kills))}
    return (
        f"{whole.model.name}: kills {phases}, prompt tokens {whole.computed} in one go, {job.computed} with "
        f"kills, {manifest} by the manifest; the worst row {max(job.costs, default=0)} of {BOUND}"
    )


async def test_tokens_of_lines_that_a_killed_run_did_not_finish(tmp_path: Path) -> None:
    """They have no journal entry; the manifest takes them from the last status.json."""
    bench = Bench(write_job(tmp_path, [chat("a", "one"), chat("b", "two")]))
    await bench.run(limit=1)
    manifest, status = (json.loads(path.read_text()) for path in (bench.paths.manifest, bench.paths.status))
    finished = manifest["runs"][0]["computed"]
    manifest["runs"][0]["ended"] = None
    status["tokens"] = {"computed": finished + 700, "reused": 30, "output": 3}
    bench.paths.manifest.write_text(json.dumps(manifest))
    bench.paths.status.write_text(json.dumps(status))
    await bench.run()
    run = json.loads(bench.paths.manifest.read_text())["runs"][0]
    assert (run["computed"], run["reused"]) == (finished + 700, 30)
