"""Embeddings and scores: those of sentence-transformers, alone and in company, whole and in chunks.

The golden vectors are the reference library's own, of the same files (tools/embedding_golden.py). Each
promise has a mutation twin: the same comparison with a bug planted, which must fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.config.settings import Config, EngineSettings, ModelSettings, SchedulerSettings
from mlxrun.core.request import FinishReason, Request, SamplingParams
from mlxrun.engine.build import build_engine
from mlxrun.engine.engine import Engine
from mlxrun.model.doctor import report_model
from mlxrun.model.pooling import encoders, pooler
from mlxrun.model.pooling.pooled_model import PoolingMode
from tests.helpers.pooling_models import (
    CROSS_ENCODERS,
    EMBEDDING_MODELS,
    QUERY,
    TEXTS,
    build_pooling_model,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "helpers" / "golden" / "embeddings.json").read_text())
TOLERANCE = 1e-4
Vectors = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("pooling")

    def get(name: str) -> Path:
        return root / name if (root / name).is_dir() else build_pooling_model(name, root / name)

    return get


@pytest.fixture(scope="module")
def get_engine(folders: Callable[[str], Path]) -> Callable[..., Engine]:
    """Engines of tiny models, one for all tests that ask for the same."""
    made: dict[Any, Engine] = {}

    def get(name: str, **options: Any) -> Engine:
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = make_engine(folders(name), **options)
        return made[key]

    return get


def make_engine(
    folder: Path, *, reproducible: bool = False, chunk: int | None = None, **model: Any
) -> Engine:
    config = Config(
        model=ModelSettings(path=str(folder), **model),
        engine=EngineSettings(reproducible=reproducible),
        scheduler=SchedulerSettings(step_ms=0, chunk=chunk, prefill_budget=chunk or 4096),
    )
    return build_engine(config)


def make_requests(engine: Engine, texts: Sequence[str], pair: str | None = None) -> list[Request]:
    tokenizer = engine.model_info.tokenizer
    found = []
    for at, text in enumerate(texts):
        made = tokenizer(text) if pair is None else tokenizer(pair, text)
        types = made["token_type_ids"] if "token_type_ids" in tokenizer.model_input_names else ()
        ids = tuple(made["input_ids"])
        found.append(
            Request(str(at), ids, SamplingParams(max_tokens=0), pooled=True, token_types=tuple(types))
        )
    return found


def compute(engine: Engine, requests: Sequence[Request]) -> Vectors:
    """The vectors of all requests, added at once."""
    for request in requests:
        engine.add(request)
    found: dict[str, bytes] = {}
    while engine.busy:
        for event in engine.step():
            assert event.finish is FinishReason.STOP, event.error
            found[event.request_id] = event.vector
    return np.stack([np.frombuffer(found[request.id], "<f4") for request in requests])


def compute_alone(engine: Engine, requests: Sequence[Request]) -> Vectors:
    return np.concatenate([compute(engine, [request]) for request in requests])


def differ(found: Vectors, wanted: Any) -> float:
    return float(np.abs(found - np.asarray(wanted).reshape(found.shape)).max())


@pytest.mark.parametrize("name", EMBEDDING_MODELS)
def test_embeddings_are_those_of_the_reference(get_engine: Callable[..., Engine], name: str) -> None:
    engine = get_engine(name)
    assert differ(compute(engine, make_requests(engine, TEXTS)), GOLDEN[name]) < TOLERANCE


def test_a_prompt_goes_before_the_text(get_engine: Callable[..., Engine]) -> None:
    engine = get_engine("qwen3")
    pooled = engine.model_info.pooled
    assert pooled is not None
    text = pooled.prompts["query"] + QUERY
    assert differ(compute(engine, make_requests(engine, [text])), GOLDEN["qwen3 query"]) < TOLERANCE
    assert differ(compute(engine, make_requests(engine, [QUERY])), GOLDEN["qwen3 query"]) > TOLERANCE


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_are_those_of_the_reference(get_engine: Callable[..., Engine], name: str) -> None:
    engine = get_engine(name)
    assert differ(compute(engine, make_requests(engine, TEXTS, QUERY)), GOLDEN[name]) < TOLERANCE


def test_token_types_tell_query_and_document_apart(get_engine: Callable[..., Engine]) -> None:
    """The twin: without them the scores are others."""
    engine = get_engine("bert-reranker")
    requests = [Request(r.id, r.prompt, r.params, pooled=True) for r in make_requests(engine, TEXTS, QUERY)]
    assert differ(compute(engine, requests), GOLDEN["bert-reranker"]) > TOLERANCE


def test_a_generating_reranker_scores_by_its_answer(get_engine: Callable[..., Engine]) -> None:
    """The oracle is one forward of the whole model, and the softmax of two of its logits."""
    from mlx_lm.utils import load_model

    engine = get_engine("qwen3-reranker", kind="reranker")
    requests = make_requests(engine, TEXTS)
    model, _ = load_model(engine.model_info.folder)
    yes, no = engine.model_info.tokenizer.convert_tokens_to_ids(["yes", "no"])
    wanted = []
    for request in requests:
        logits = np.array(model(mx.array([request.prompt]))[0, -1])
        wanted.append(1 / (1 + np.exp(logits[no] - logits[yes])))
    assert differ(compute(engine, requests), wanted) < TOLERANCE
    assert len({round(float(score), 3) for score in wanted}) == len(wanted)


@pytest.mark.parametrize("name", [*EMBEDDING_MODELS, "xlm-roberta-reranker"])
def test_company_changes_no_vector(get_engine: Callable[..., Engine], name: str) -> None:
    engine = get_engine(name)
    requests = make_requests(engine, TEXTS)
    alone = compute_alone(engine, requests)
    assert differ(compute(engine, requests), alone) < 1e-5
    assert differ(compute(engine, requests[::-1])[::-1], alone) < 1e-5


@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta"])
def test_padding_changes_no_vector(
    get_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The layout of other devices; on a CPU nothing is padded."""
    monkeypatch.setattr(encoders, "group_lengths", join_in_one_block)
    engine = get_engine(name)
    assert differ(compute(engine, make_requests(engine, TEXTS)), GOLDEN[name]) < TOLERANCE


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_reproducible_vectors_are_equal_bit_for_bit(get_engine: Callable[..., Engine], name: str) -> None:
    engine = get_engine(name, reproducible=True, chunk=16)
    requests = make_requests(engine, TEXTS)
    alone = compute_alone(engine, requests)
    assert np.array_equal(compute(engine, requests[::-1])[::-1], alone)


@pytest.mark.parametrize("mode", ("cls", "max", "mean", "weightedmean", "lasttoken"))
def test_chunks_change_no_pooled_state(mode: PoolingMode) -> None:
    states = mx.random.normal((3, 9, 4), key=mx.random.key(1))
    whole, chunked = (pooler.RowPooler((mode,), (9, 1, 5)) for _ in range(2))
    whole.add(states, 0)
    for start, stop in ((0, 2), (2, 3), (3, 9)):
        chunked.add(states[:, start:stop], start)
    assert differ(np.array(chunked.finish()), np.array(whole.finish())) < 1e-6


def test_a_slice_is_a_part_of_a_text(get_engine: Callable[..., Engine]) -> None:
    """A decoder computes texts in chunks of any size; the vectors stay those of the reference."""
    engine = get_engine("qwen3", chunk=16)
    (request,) = make_requests(engine, TEXTS[2:3])
    assert 16 < len(request.prompt) <= 32
    engine.add(request)
    assert engine.step() == [] and engine.busy
    (event,) = engine.step()
    assert differ(np.frombuffer(event.vector, "<f4"), GOLDEN["qwen3"][2]) < TOLERANCE


@pytest.mark.parametrize("name", ["bert", "qwen3", "bert-reranker"])
def test_a_trial_computes_without_a_text_and_raises_what_the_model_raises(
    get_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runner = get_engine(name).pooling.runner
    runner.compute_trial()

    def fail(*rest: object) -> mx.array:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner._states, "compute", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.compute_trial()


def test_the_doctor_says_what_a_model_gives(get_engine: Callable[..., Engine]) -> None:
    for name, what in (("bert", "embeddings"), ("bert-reranker", "scores of documents")):
        finding = report_model(name, get_engine(name).model_info)
        assert finding.level == "ok" and what in finding.value and not finding.advice


# -- the twins: what must be found if it is broken ---------------------------------------------------------


def join_in_one_block(lengths: Sequence[int]) -> list[list[int]]:
    """As on other devices than CPUs: with padding."""
    return [list(lengths)]


def drop_padding_mask(lengths: mx.array, size: int) -> mx.array:
    return mx.zeros((lengths.shape[0], 1, 1, size))


class LongestRowPooler(pooler.RowPooler):
    """Pools every row as if it were as long as the longest."""

    def __init__(self, modes: Sequence[PoolingMode], lengths: Sequence[int]) -> None:
        super().__init__(modes, [max(lengths)] * len(lengths))


def compare_in_company(get_engine: Callable[..., Engine], monkeypatch: Any, name: str, plant: Any) -> float:
    """How far vectors in company differ from those alone, once a bug is planted after the load check."""
    engine = get_engine(name)
    requests = make_requests(engine, TEXTS)
    alone = compute_alone(engine, requests)
    plant(monkeypatch)
    return differ(compute(engine, requests), alone)


def plant_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "group_lengths", join_in_one_block)
    monkeypatch.setattr(encoders, "make_padding_mask", drop_padding_mask)


def plant_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.model.pooling.pooling_runner.RowPooler", LongestRowPooler)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("bert", plant_mask),
        ("modernbert", plant_mask),
        ("bert", plant_length),
        ("qwen3", plant_length),
    ],
    ids=["bert mask", "modernbert mask", "bert length", "qwen3 length"],
)
def test_company_is_seen_to_change_a_vector(
    get_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, name: str, plant: Any
) -> None:
    assert compare_in_company(get_engine, monkeypatch, name, plant) > 1e-3


@pytest.mark.parametrize("plant", [plant_mask, plant_length])
def test_the_check_at_load_finds_padding(
    folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plant: Any,
) -> None:
    """Texts are then computed one by one, and their vectors are right."""
    plant(monkeypatch)
    engine = make_engine(folders("bert"))
    assert "one by one" in caplog.text
    assert differ(compute(engine, make_requests(engine, TEXTS)), GOLDEN["bert"]) < TOLERANCE


def test_a_window_of_another_size_is_seen(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = encoders.read_modernbert_config
    monkeypatch.setattr(
        encoders, "read_modernbert_config", lambda config: {**read(config), "local_attention": 128}
    )
    engine = make_engine(folders("modernbert"))
    assert differ(compute(engine, make_requests(engine, TEXTS)), GOLDEN["modernbert"]) > TOLERANCE


def test_positions_of_another_start_are_seen(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "get_first_position", lambda config: 0)
    engine = make_engine(folders("xlm-roberta"))
    assert differ(compute(engine, make_requests(engine, TEXTS)), GOLDEN["xlm-roberta"]) > TOLERANCE
