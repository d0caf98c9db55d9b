"""Rows with latent attention or a soft cap decode in one forward, with the ORACLE's answers; and a forward
that leaves out what their scores have beside others is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.hooks import attention
from mlxrun.model.hooks.logit_rule import LogitRule, attend_arrays
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.run.compute_methods import ComputeMethods, DecodeMethod
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo

PROMPTS = text_models.prompts(17, [5, 30, 12, 21])
COUNT = 16
FAMILIES = ("deepseek_v3", "gemma2")


def check_rows(zoo: Zoo, family: str, method: DecodeMethod) -> None:
    """Rows that join one after the other have the ORACLE's answers, and logprobs."""
    engine = engine_driver.make_real_engine(zoo.text(family), ComputeMethods(method))
    asks = [engine_driver.make_text_request(str(i), p, max_tokens=COUNT) for i, p in enumerate(PROMPTS)]
    events = engine_driver.run_requests(engine, [TimedRequest(ask, 2 * i) for i, ask in enumerate(asks)])
    for i, ids in enumerate(PROMPTS):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, ids, COUNT))


@pytest.mark.parametrize("family", FAMILIES)
def test_such_rows_decode_in_one_forward(zoo: Zoo, family: str) -> None:
    report = probe_model(zoo.text(family))
    assert list_failed(report) == [] and report.methods.decode == "ragged"
    check_rows(zoo, family, "ragged")


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_without_their_part_are_found(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MUTANT: positions are zero, and no score is capped."""

    def attend_wrongly(queries: Any, keys: Any, values: Any, mask: Any, rule: LogitRule, *more: Any) -> Any:
        turned = None if rule.positions is None else mx.zeros_like(rule.positions)
        return attend_arrays(queries, keys, values, mask, replace(rule, positions=turned, cap=0.0), *more)

    monkeypatch.setattr(attention, "attend_arrays", attend_wrongly)
    report = probe_model(zoo.text(family))
    assert list_failed(report)[0] == "decode ragged"
    with pytest.raises(AssertionError):
        check_rows(zoo, family, "ragged")


def test_quantized_keys_have_neither() -> None:
    keys = KVQuantization(8, 32).quantize(mx.zeros((1, 1, 4, 32)))
    queries = mx.zeros((1, 2, 1, 32))
    for rule in (LogitRule(0.3, cap=2.0), LogitRule(0.3, positions=queries)):
        with pytest.raises(TypeError, match="keys that are not quantized"):
            attend_arrays(queries, keys, keys, None, rule)
