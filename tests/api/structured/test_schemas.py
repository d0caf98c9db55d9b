"""A model of random weights tries everything, so its answers show whether a schema is enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

from benchmarks.tiny.byte_tokenizer import EOS
from mlxrun.api.structured.grammar import compile_grammar
from mlxrun.core.errors import RequestError
from mlxrun.core.request import FinishReason, Request
from tests.helpers import engine_driver, schema_cases, text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.schema_cases import Schema

pytestmark = pytest.mark.thorough

ROWS = 16
FORMATS = FormatChecker([name for name in FormatChecker.checkers if name != "time"])
# A random model rarely closes anything by itself.
CLOSERS = {ord(c): 6.0 for c in '",]}'} | {EOS: 8.0}


@FORMATS.checks("time")
def _is_time(text: object) -> bool:
    """RFC 3339; the library's own is draft 3's, which had no offset."""
    shape = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)"
    return not isinstance(text, str) or re.fullmatch(shape, text, re.IGNORECASE) is not None


@dataclass
class Outcome:
    """What became of the schemas that were tried."""

    valid: int = 0
    cut: list[Schema] = field(default_factory=list)  # max_tokens came first
    refused: list[str] = field(default_factory=list)
    wrong: list[tuple[Schema, str, str]] = field(default_factory=list)


def try_all(zoo: Zoo, schemas: Sequence[Schema], max_tokens: int = 400) -> Outcome:
    """Sample one answer to each schema, `ROWS` at a time in one batch."""
    engine = engine_driver.make_real_engine(
        zoo.text("llama", ends=True), max_running=ROWS, max_queue=len(schemas)
    )
    tried, requests = Outcome(), list[Request]()
    for i, schema in enumerate(schemas):
        try:
            made = compile_grammar("json_schema", schema, engine.model_info, param="schema", strict=False)
        except RequestError as error:
            tried.refused.append(str(error))
            continue
        if warnings := made.matcher.get_grammar_warnings():
            tried.refused.append(warnings[0])
            continue
        request = engine_driver.make_text_request(
            str(i),
            text_models.prompts(i, [5])[0],
            max_tokens=max_tokens,
            temperature=1.0,
            seed=i,
            stop_ids=frozenset({EOS}),
            logit_bias=CLOSERS,
            logprobs=None,
        )
        requests.append(replace(request, grammar=made))
    for name, event in engine_driver.run_requests(engine, requests).items():
        schema = schemas[int(name)]
        assert event.error is None, (schema, event.error)
        if event.finish is FinishReason.STOP:
            text, problem = judge(schema, event.tokens)
            tried.valid += problem is None
            tried.wrong += [(schema, text, problem)] if problem else []
        else:
            tried.cut.append(schema)
    return tried


def judge(schema: Any, tokens: Sequence[int]) -> tuple[str, str | None]:
    """Return the text, and what is wrong with it."""
    text = bytes(tokens).decode()
    validator = validator_for(schema, default=Draft202012Validator)(schema, format_checker=FORMATS)
    try:
        errors = list(validator.iter_errors(json.loads(text)))
    except json.JSONDecodeError as error:
        return text, str(error)
    return text, errors[0].message if errors else None


def test_answers_match_their_schemas(zoo: Zoo) -> None:
    """Different schemas in one batch, each answer valid by its own."""
    schemas = [
        *schema_cases.HANDWRITTEN,
        *(schema_cases.make_random(seed) for seed in range(26)),
    ]
    tried = try_all(zoo, schemas)
    assert tried.wrong == []
    assert tried.refused == []
    assert tried.valid >= 36, tried.cut


def test_the_judge_finds_answers_that_do_not_match() -> None:
    """The counterpart: answers that are nearly right."""
    good = '{"name":"x","age":3,"tags":["a",null]}'
    assert judge(schema_cases.PERSON, good.encode())[1] is None
    for bad in (good[:-1], good.replace("3", "131"), good.replace('"a"', '"c"'), good.replace("age", "agf")):
        assert judge(schema_cases.PERSON, bad.encode())[1] is not None


@pytest.mark.sweep
def test_hundreds_of_schemas(zoo: Zoo) -> None:
    """All answers are valid, for at least 300 schemas; refused schemas and answers cut off are counted."""
    schemas = [
        *schema_cases.load_shipped(),
        *schema_cases.HANDWRITTEN,
        *(schema_cases.make_random(n) for n in range(400)),
    ]
    tried = try_all(zoo, schemas, max_tokens=1500)
    print(f"valid {tried.valid}, cut {len(tried.cut)}, refused {len(tried.refused)}: {set(tried.refused)}")
    assert tried.wrong == []
    assert tried.valid >= 300
    assert len(tried.refused) + len(tried.cut) < 0.1 * len(schemas)
