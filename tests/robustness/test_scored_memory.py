"""Prompts whose logprobs are wanted, many and long, in little memory: rows are preempted in the middle of
prompts and answers, and each logprob is that of the plain forward. What can never fit is refused in a
sentence. A job with little memory gives the bytes of one with plenty.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings
from mlxrun.core.errors import OutOfMemory
from mlxrun.core.request import Request, TokenLogprob
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler import token_budget
from mlxrun.engine.scheduler.request_state import RequestLogprobs
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo
from tests.helpers.served_model import run_model_server
from tests.helpers.storm_counts import count, make_rng
from tests.parity.test_prompt_scores import TOLERANCE, make_scored, measure_error, score_cold
from tests.server.endpoints.test_embeddings import call

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_once")]

PAGE = 256  # tokens, to which the memory of a row is rounded up
ROWS = 2.5  # of two pages, that fit beside the weights


@pytest.fixture(autouse=True)
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are admitted without room for their answers, so that they outgrow the memory."""
    monkeypatch.setattr(token_budget, "DECODE_RESERVE", 0)


def make_engine(zoo: Zoo, family: str, **options: Any) -> Engine:
    """An engine whose memory is for `ROWS` rows of two pages."""
    memory = engine_driver.make_real_engine(zoo.text(family), chunk=32, **options).scheduler.limits.memory
    limit = memory.weights + int(ROWS * memory.footprint.compute_row_bytes(2 * PAGE)) + 32 * memory.transient
    return engine_driver.make_real_engine(
        zoo.text(family), chunk=32, memory_limit=limit, memory_headroom=0.0, **options
    )


def make_requests(rng: random.Random, number: int) -> list[TimedRequest]:
    """Prompts of nearly one page, with answers that reach into the next; some begin alike, some vanish."""
    beginning = text_models.prompts(rng.randrange(1000), [100])[0]
    found = []
    for at in range(number):
        ids = text_models.prompts(rng.randrange(10**6), [rng.randrange(PAGE - 40, PAGE)])[0]
        ids = [*beginning, *ids[len(beginning) :]] if rng.random() < 0.4 else ids
        request = make_scored(
            f"p{at}", ids, rng.randrange(3), max_tokens=rng.choice((0, 1, 48)), logprobs=None
        )
        start = rng.randrange(number)
        found.append(TimedRequest(request, start, start + 15 if rng.random() < 0.15 else None))
    return found


def score_all(zoo: Zoo, family: str, engine: Engine, todo: list[TimedRequest]) -> tuple[float, int]:
    """The largest error of a logprob of those that stay, and how many rows were preempted."""
    preempted: list[str] = []
    preempt = engine.scheduler.preempt

    def note(state: Any) -> None:
        preempted.append(state.id)
        preempt(state)

    engine.scheduler.preempt = note  # type: ignore[method-assign]
    events = engine_driver.run_requests(engine, todo)
    whole = [ask.request for ask in todo if ask.abort_step is None]
    count("prompts that were scored in little memory", len(todo))
    count("preempted rows", len(preempted))
    assert engine.scheduler.requests == () and engine.generation.errors == 0
    return max(measure_each(zoo, family, events[request.id], request) for request in whole), len(preempted)


def measure_each(zoo: Zoo, family: str, event: Any, request: Request) -> float:
    return measure_error(event, request, score_cold(zoo, family, request.prompt))


@pytest.mark.parametrize("backend", [pytest.param("none", marks=pytest.mark.sweep), "memory"])
@pytest.mark.parametrize(
    ("seed", "number"), [(0, 12), *(pytest.param(seed, 80, marks=pytest.mark.sweep) for seed in range(1, 6))]
)
def test_many_prompts_in_little_memory(zoo: Zoo, backend: str, seed: int, number: int, night: int) -> None:
    engine = make_engine(zoo, "llama", backend=backend)
    error, preempted = score_all(zoo, "llama", engine, make_requests(make_rng(seed, night), number))
    assert error < TOLERANCE and preempted > 0
    with pytest.raises(OutOfMemory, match="the prompt can never fit in memory: weights .* > limit"):
        engine.add(make_scored("huge", [1] * 3000))


def compute_limit(zoo: Zoo, tokens: int) -> int:
    """Bytes in which a prompt of so many tokens just fits, and several short ones beside each other."""
    config = engine_driver.make_config(zoo.text("llama"), backend="none")
    memory = engine_driver.make_real_engine(Path(config.model.path)).scheduler.limits.memory
    return memory.compute_needed_bytes([tokens], 64)


def test_a_server_with_little_memory(zoo: Zoo) -> None:
    """Many echoes at once: each is that of a server with plenty; what never fits is a 400 with the sum."""
    rng = random.Random(5)
    texts = ["".join(rng.choice("abcdef ") for _ in range(rng.randrange(100, 500))) for _ in range(16)]
    bodies = [
        {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": at % 2} for at, text in enumerate(texts)
    ]
    found = []
    for limit in (None, compute_limit(zoo, 2 * PAGE + 1)):
        scheduler = SchedulerSettings(step_ms=0, memory_limit=limit, memory_headroom=0.0, chunk=64)
        model = ModelSettings(path=str(zoo.text("llama")))
        with (
            run_model_server(Config(model=model, scheduler=scheduler)) as server,
            ThreadPoolExecutor(16) as pool,
        ):
            replies = list(pool.map(lambda body: call(server, "/v1/completions", body), bodies))
            assert {status for status, _ in replies} == {200}
            found.append([reply["choices"][0]["logprobs"]["token_logprobs"] for _, reply in replies])
            status, reply = call(server, "/v1/completions", {**bodies[0], "prompt": "a" * 3000})
            count("prompts that were scored in little memory", 17)
    assert status == 400 and "the prompt can never fit in memory" in reply["error"]["message"]
    for one, other, body in zip(*found, bodies, strict=True):
        size = len(str(body["prompt"]))
        assert one[0] is other[0] is None and one[1:size] == pytest.approx(other[1:size], abs=TOLERANCE)


def test_a_job_with_little_memory(zoo: Zoo, tmp_path: Path) -> None:
    """The bytes of a job with plenty, and a line that never fits is refused by itself."""
    rng, lines = random.Random(6), []
    for at in range(14):
        texts = ["".join(rng.choice("abcdef ") for _ in range(rng.randrange(100, 400))) for _ in range(2)]
        lines.append({"id": f"{at}", "prompt": texts, "echo": True, "logprobs": 1, "max_tokens": 0})
    lines.append({"id": "huge", "prompt": "a" * 3000, "prompt_logprobs": 0, "max_tokens": 1})
    outputs = []
    for name, limit in (("plenty", "1GB"), ("little", f"{compute_limit(zoo, 2 * PAGE + 1)}B")):
        job = tmp_path / f"{name}.jsonl"
        job.write_text("".join(json.dumps(line) + "\n" for line in lines[: 15 if name == "little" else 14]))
        settings = (f"model.path={zoo.text('llama')}", f"scheduler.memory_limit={limit}")
        settings += ("engine.reproducible=true", "scheduler.memory_headroom=0", "scheduler.chunk=64")
        code = main(["batch", str(job), *(f"--set={each}" for each in settings)])
        assert code == (1 if name == "little" else 0)
        outputs.append(read_answers(job.with_suffix(".out.jsonl")))
        count("prompts that were scored in little memory", 29)
    assert outputs[0] == outputs[1] and len(outputs[0]) == 14
    errors = (tmp_path / "little.errors.jsonl").read_text()
    assert errors.count("\n") == 1 and "the prompt can never fit in memory" in errors


def read_answers(path: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["custom_id"]: each["response"]["body"]["choices"] for each in records}


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10, 12))
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "mamba2"])
def test_many_prompts_of_other_families(
    zoo: Zoo, family: str, seed: int, night: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows and recurrent states, in small row groups."""
    engine_driver.use_small_groups(monkeypatch)
    engine = make_engine(zoo, family)
    error, _ = score_all(zoo, family, engine, make_requests(make_rng(seed, night), 40))
    assert error < TOLERANCE


def test_scores_that_are_taken_twice_would_be_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: a preempted row takes those again that it has."""

    def add_again(self: RequestLogprobs, start: int, logprobs: list[TokenLogprob]) -> bool:
        self._unsent += logprobs[: len(self.request.prompt) - self.next_position]
        self.next_position = min(self.next_position + len(logprobs), len(self.request.prompt))
        return True

    monkeypatch.setattr(RequestLogprobs, "add", add_again)
    engine = make_engine(zoo, "llama", backend="none")
    assert score_all(zoo, "llama", engine, make_requests(random.Random(0), 8))[0] > 0.01
