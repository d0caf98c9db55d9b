"""Each row is sampled by its own settings, whatever its neighbours' are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.request import SamplingParams
from mlxrun.model.run.sampler import (
    RowSampling,
    SampledBatch,
    Sampler,
    _make_bias,
    add_exponentials,
    read_sampled,
)
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo

pytestmark = pytest.mark.thorough

VOCAB = 50
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.8, seed=3)
# One of everything, and everything at once.
PARAMS = [
    GREEDY,
    WARM,
    replace(WARM, top_k=5),
    replace(WARM, top_p=0.6),
    replace(WARM, min_p=0.2),
    replace(WARM, repetition_penalty=1.5),
    replace(WARM, presence_penalty=1.2, frequency_penalty=0.7),
    replace(WARM, logit_bias={3: 5.0, 7: -100.0}),
    replace(GREEDY, repetition_penalty=1.3, logit_bias={1: 2.5}),
    replace(WARM, seed=4, temperature=2.0, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(
        temperature=1.3,
        top_k=12,
        top_p=0.85,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        logit_bias={9: 1.5},
        seed=11,
    ),
]


def logits(seed: int, rows: int, vocab: int = VOCAB) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def started(params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> RowSampling:
    return RowSampling.start(params, prompt, output, VOCAB)


@pytest.mark.parametrize("vocab", [49_152, 50_257, 64, 50])
def test_unlikely_tokens_are_not_lost(vocab: int) -> None:
    """Added one after the other in float32, they are lost beside a likely one."""
    x = 1.5 * logits(0, 8, vocab)
    x[:, 7] += 22
    x[:, 9] = -np.inf
    wanted = np.log(np.exp(x.astype(np.float64)).sum(axis=-1, keepdims=True))
    assert np.abs(np.array(add_exponentials(mx.array(x))) - wanted).max() < 2e-5
    lost = np.abs(np.array(mx.logsumexp(mx.array(x), axis=-1, keepdims=True)) - wanted).max()
    assert vocab < 1000 or mx.default_device() != mx.Device(mx.cpu) or lost > 5e-5, "MLX adds well by itself"
    nothing = add_exponentials(mx.full((1, vocab), -mx.inf))
    assert nothing.item() == -np.inf


def tokens(batch: SampledBatch) -> list[int]:
    return batch.tokens.tolist()


def allowed(x: np.ndarray, p: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The probability of each token, written out in float64 for one row."""
    x = x.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * list(output).count(token)
    if p.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    x /= p.temperature
    order = np.argsort(-x, kind="stable")
    weights = np.exp(x[order] - x.max())
    weights[p.top_k or len(x) :] = 0
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    keep = (before < p.top_p) & (weights >= p.min_p * weights[0])
    keep[0] = True
    weights = np.where(keep, weights, 0)
    result = np.zeros(len(x))
    result[order] = weights / weights.sum()
    return result


# -- a row is itself in any company -------------------------------------------------------------------------


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    """11 settings together and in another order, over a dozen steps, with the penalties' memory."""
    steps = [logits(step, len(PARAMS)) for step in range(12)]
    prompt = [1, 3, 5, 7]

    def run(order: Sequence[int]) -> list[list[int]]:
        sampler = Sampler([started(PARAMS[i], prompt, [5]) for i in order], VOCAB)
        sampled_rows: list[list[int]] = [[] for _ in PARAMS]
        for step, x in enumerate(steps):
            made = tokens(sampler(mx.array(x[list(order)]), [10 + 3 * i + step for i in order]))
            for i, token in zip(order, made, strict=True):
                sampled_rows[i].append(token)
        return sampled_rows

    everyone = list(range(len(PARAMS)))
    together = run(everyone)
    alone = [run([i])[i] for i in everyone]
    assert together == alone
    assert run(everyone[::-1]) == alone
    assert len({tuple(d) for d in alone}) == len(alone)  # the settings matter


def test_rows_that_join_and_leave_keep_their_memory() -> None:
    """Penalties follow their row through new samplers in another order, as when rows join and leave."""
    x = [logits(100 + step, 1)[0] for step in range(20)]

    def alone(index: int) -> list[int]:
        sampler = Sampler([started(PARAMS[index], [2, 4])], VOCAB)
        return [tokens(sampler(mx.array(x[n][None]), [n]))[0] for n in range(20)]

    states = {i: started(PARAMS[i], [2, 4]) for i in (1, 5, 6, 10)}
    sampled_rows: dict[int, list[int]] = {i: [] for i in states}
    rng = np.random.default_rng(0)
    while any(len(d) < 20 for d in sampled_rows.values()):
        left = [i for i in states if len(sampled_rows[i]) < 20]
        order = rng.permutation(left)[: int(rng.integers(1, len(left) + 1))].tolist()
        sampler = Sampler([states[i] for i in order], VOCAB)
        for _ in range(int(rng.integers(1, 4))):
            if any(len(sampled_rows[i]) == 20 for i in order):
                break
            where = [len(sampled_rows[i]) for i in order]
            made = tokens(sampler(mx.array(np.stack([x[n] for n in where])), where))
            for i, token in zip(order, made, strict=True):
                sampled_rows[i].append(token)
    assert sampled_rows == {i: alone(i) for i in states}


def test_a_row_that_is_computed_again_goes_on_as_it_was() -> None:
    """A preempted row starts anew from prompt and answer: the rest of the answer is the same."""
    x = logits(7, 16)
    for params in PARAMS:
        sampler = Sampler([started(params, [8, 9])], VOCAB)
        full = [tokens(sampler(mx.array(x[n][None]), [2 + n]))[0] for n in range(16)]
        again = Sampler([started(params, [8, 9], full[:6])], VOCAB)
        assert [tokens(again(mx.array(x[n][None]), [2 + n]))[0] for n in range(6, 16)] == full[6:]


def test_greedy_rows_are_not_touched_by_sampled_neighbours() -> None:
    x = logits(5, 3)
    sampler = Sampler([started(p) for p in (GREEDY, replace(WARM, temperature=9.0), GREEDY)], VOCAB)
    for position in range(20):
        made = tokens(sampler(mx.array(x), [position] * 3))
        assert [made[0], made[2]] == [int(x[0].argmax()), int(x[2].argmax())]


def test_a_filter_beside_it_takes_nothing_from_a_row_without_one() -> None:
    """Rounding must not drop the tail of top_p 1: cumulated float32 probabilities reach 1 before the end."""
    x = -np.linspace(0, 40, 4000, dtype=np.float32)[None].repeat(2, axis=0)
    sampler = Sampler(
        [RowSampling(SamplingParams(temperature=1.0)), RowSampling(replace(WARM, top_k=2))], 4000
    )
    remaining = np.array(sampler._filter(mx.array(x)))
    assert np.array_equal(remaining[0], x[0])
    assert np.isfinite(remaining[1]).sum() == 2


# -- the distribution ---------------------------------------------------------------------------------------


def count_samples(
    params: SamplingParams, x: np.ndarray, count: int, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """How often each token is sampled: the same logits at `count` positions, many rows at once."""
    width = 500
    total = np.zeros(len(x), dtype=int)
    for start in range(0, count, width):
        sampler = Sampler([started(params, prompt, output) for _ in range(width)], VOCAB)
        made = sampler(mx.array(np.tile(x, (width, 1))), list(range(start, start + width)))
        total += np.bincount(np.array(made.tokens), minlength=len(x))
    return total


@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_draws_follow_the_distribution(index: int) -> None:
    """Temperature, filters, penalties and bias against a reference of one row; the seeds are fixed."""
    params, x = PARAMS[index], logits(40 + index, 1)[0]
    prompt, output = [0, 1, 2, int(x.argmax())], [2, int(np.argsort(x)[-2]), 2, 6]
    wanted = allowed(x, params, prompt, output)
    count = 4000
    got = count_samples(params, x, count, prompt, output)
    assert got.sum() == count
    assert not got[wanted == 0].any()
    # Pearson's chi-square over tokens that are expected often enough, the others taken together.
    often = wanted * count >= 5
    observed = np.append(got[often], got[~often].sum())
    expected = np.append(wanted[often], wanted[~often].sum()) * count
    used = expected > 0
    chi = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    assert chi <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9, (chi, freedom)


@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_every_step_of_the_filters_is_the_references(index: int) -> None:
    """What may be sampled at all, and with which probability, to float32's precision."""
    params = PARAMS[index]
    for seed in range(20):
        x = logits(seed, 1)[0]
        prompt, output = [seed, 2, 3], [seed + 5, 3, 3]
        sampler = Sampler([started(params, prompt, output)], VOCAB)
        y = sampler.adjust_logits(mx.array(x[None]))
        if params.temperature == 0:
            assert int(mx.argmax(y)) == int(allowed(x, params, prompt, output).argmax())
            continue
        y = y / sampler._temperature
        y = sampler._filter(y) if sampler._filters else y
        got = np.array(mx.softmax(y, axis=-1))[0]
        assert np.allclose(got, allowed(x, params, prompt, output), atol=2e-6)


def test_noise_differs_by_seed_and_position_alone() -> None:
    """No two (seed, position) share their noise, large and neighbouring seeds included."""
    x = mx.zeros((1, VOCAB))
    seeds = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    seen = {}
    for seed in seeds:
        sampler = Sampler([RowSampling(SamplingParams(temperature=1.0, seed=seed))], VOCAB)
        for position in range(5):
            noise = np.array(sampler._add_noise(x, [position]))[0]
            seen[seed, position] = tuple(noise.tolist())
            assert np.isfinite(noise).all()
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    ("params", "remaining"),
    [
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_k": 1}, 1),
        ({"top_k": VOCAB + 9}, VOCAB),
        ({"top_p": 0.999999, "min_p": 1e-9, "top_k": 3}, 3),
    ],
)
def test_at_the_edges_at_least_one_token_stays(params: dict[str, Any], remaining: int) -> None:
    x = logits(1, 1)
    sampler = Sampler([RowSampling(replace(WARM, **params))], VOCAB)
    y = np.array(sampler._filter(mx.array(x)))[0]
    assert np.isfinite(y).sum() == remaining
    assert np.isfinite(y[x.argmax()])


# -- logprobs -----------------------------------------------------------------------------------------------


def test_logprobs_are_float32_and_of_the_model_itself() -> None:
    """Before temperature, filters, bias and penalties, from bfloat16 too; the n likeliest, best first."""
    params = [
        replace(p, logprobs=n) for p, n in zip(PARAMS, (0, 1, 2, 3, None, 5, 0, 50, 1, 2, 3), strict=True)
    ]
    x = mx.array(logits(9, len(params))).astype(mx.bfloat16)
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    wanted = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    batch = Sampler([started(p, [1], [2]) for p in params], VOCAB)(x, [4] * len(params))
    assert batch.logprobs is not None and batch.logprobs.dtype == mx.float32
    for row, (sampled, p) in enumerate(zip(read_sampled(batch, params), params, strict=True)):
        if p.logprobs is None:
            assert sampled.logprob is None
            continue
        assert sampled.logprob is not None
        assert sampled.logprob.logprob == pytest.approx(wanted[row, sampled.token], abs=1e-5)
        top = sampled.logprob.top
        assert len(top) == p.logprobs
        best = np.sort(wanted[row])[::-1][: p.logprobs]
        assert np.allclose([value for _, value in top], best, atol=1e-5)
        assert all(value == pytest.approx(wanted[row, token], abs=1e-5) for token, value in top)


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    params = SamplingParams(logprobs=VOCAB + 5)
    batch = Sampler([RowSampling(params)], VOCAB)(mx.array(logits(1, 1)), [0])
    (sampled,) = read_sampled(batch, [params])
    assert sampled.logprob is not None
    assert sorted(token for token, _ in sampled.logprob.top) == list(range(VOCAB))


def test_without_logprobs_none_are_made() -> None:
    batch = Sampler([started(GREEDY), started(WARM)], VOCAB)(mx.array(logits(1, 2)), [0, 0])
    assert batch.logprobs is None and batch.top_ids is None
    assert len(batch.list_arrays()) == 1


# -- answers that may not end yet ---------------------------------------------------------------------------


def test_the_first_tokens_are_no_end_of_the_answer() -> None:
    """Until the minimum is reached, counted from the prompt's end; rows without a minimum are as before."""
    x = logits(3, 3)
    likely = np.argsort(-x, axis=-1)
    ends = frozenset(int(t) for t in likely[:, 0]) | {10**6}  # one that the logits do not have
    params = replace(GREEDY, min_tokens=2, end_ids=ends)
    rows = [started(params, [1, 2, 3]), started(GREEDY, [1]), started(params, [1, 2, 3, 4, 5], [6])]
    sampler = Sampler(rows, VOCAB)
    rest = [next(int(t) for t in row if int(t) not in ends) for row in likely]
    best = [int(row[0]) for row in likely]
    assert tokens(sampler(mx.array(x), [3, 1, 6])) == [rest[0], best[1], rest[2]]
    assert tokens(sampler(mx.array(x), [4, 2, 7])) == [rest[0], best[1], best[2]]
    assert tokens(sampler(mx.array(x), [5, 3, 8])) == best
    assert sampler._suppressed is None, "what is over costs nothing"


def test_a_grammar_that_allows_nothing_else_wins() -> None:
    """A complete answer ends, as any other token would break it; a grammar with a choice waits."""
    x = logits(4, 2)
    params = replace(WARM, min_tokens=9, end_ids=frozenset({7, 8}), top_k=3)
    mask = np.zeros((2, VOCAB), dtype=bool)
    mask[0, 7] = mask[1, [7, 8, 20]] = True
    sampler = Sampler([started(params, [1]), started(params, [1])], VOCAB)
    for position in range(1, 9):
        assert tokens(sampler(mx.array(x), [position] * 2, mx.array(mask))) == [7, 20]


def test_no_bias_makes_a_masked_end_likely() -> None:
    x = logits(6, 1)
    params = replace(WARM, min_tokens=50, end_ids=frozenset({5}), logit_bias={5: 100.0})
    sampler = Sampler([started(params)], VOCAB)
    assert 5 not in {tokens(sampler(mx.array(x), [position]))[0] for position in range(50)}


# -- in the engine ------------------------------------------------------------------------------------------

MIXED = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.9, "seed": 2},
    {"temperature": 1.5, "top_k": 10, "seed": 1},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02, "seed": 5},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "seed": 5},
    {"temperature": 0.0, "presence_penalty": 0.8, "logit_bias": {65: 3.0}},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_seeded_request_gives_the_same_text_in_any_batch(zoo: Zoo, family: str) -> None:
    """Alone, with others, joining later, preempted on the way; other seeds give other texts."""
    (prompt,) = text_models.prompts(3, [19])
    wanted = []
    engine = engine_driver.make_real_engine(zoo.text(family), max_running=1)
    for params in MIXED:
        wanted.append(
            engine_driver.run_requests(engine, [engine_driver.make_text_request("alone", prompt, **params)])[
                "alone"
            ].tokens
        )
    assert len(set(wanted)) == len(wanted)

    engine = engine_driver.make_real_engine(zoo.text(family))
    asks = [
        engine_driver.TimedRequest(engine_driver.make_text_request(str(i), prompt, **p), add_step=3 * i)
        for i, p in enumerate(MIXED)
    ]

    def preempt(step: int) -> None:
        for entry in engine.scheduler.requests:
            if step == 9 + 4 * int(entry.id) and entry.running:
                engine.scheduler.preempt(entry)  # type: ignore[arg-type]

    for each in (lambda step: None, preempt):
        events = engine_driver.run_requests(engine, asks, each)
        assert [events[str(i)].tokens for i in range(len(MIXED))] == wanted


def test_tokens_beyond_the_logits_are_neither_counted_nor_biased() -> None:
    """Placeholders of images, and tokens of the tokenizer alone: MLX writes without a check of bounds."""
    params = replace(GREEDY, repetition_penalty=1.5, logit_bias={2: 3.0, 7: 9.0})
    row = RowSampling.start(params, [1, 4, 1 << 20], [4, 9], 4)
    assert row.seen is not None and row.counts is not None
    assert row.seen.tolist() == [False, True, False, False] and row.counts.tolist() == [0, 0, 0, 0]
    bias = _make_bias([params, replace(params, logit_bias={7: 9.0})], 4)
    assert bias is not None and bias.tolist() == [[0, 0, 3, 0], [0, 0, 0, 0]]
