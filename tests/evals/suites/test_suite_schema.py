"""The schema of suites, and suites made of plain values."""

from __future__ import annotations

import json

import jsonschema

from mlxrun.config.setting_fields import build_settings, list_class_fields
from mlxrun.evals.suites.suite_schema import build_suite_schema
from mlxrun.evals.suites.suite_settings import FewShot, HubSource, Suite, SuiteModel, SuiteTask


def test_the_schema_is_valid_and_describes_every_key() -> None:
    schema = build_suite_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == ["models", "tasks"]
    task = schema["properties"]["tasks"]["additionalProperties"]["properties"]
    assert task["limit"] | {"description": ""} == {
        "description": "",
        "type": ["integer", "null"],
        "minimum": 1,
        "default": None,
    }
    assert task["endpoint"]["enum"] == ["chat", "completion"]
    assert task["choices"]["type"] == ["string", "array"]
    assert task["few_shot"]["required"] == ["answer"] and task["few_shot"]["type"] == ["object", "null"]
    for cls in (Suite, SuiteModel, SuiteTask, FewShot, HubSource):
        assert all(info.doc.endswith(".") for info in list_class_fields(cls))


def test_defaults_fit_the_schema() -> None:
    validator = jsonschema.Draft202012Validator(build_suite_schema())
    task = {info.key: info.default for info in list_class_fields(SuiteTask) if not info.is_required}
    assert not list(
        validator.iter_errors({"models": {"a": None}, "tasks": {"t": json.loads(json.dumps(task))}})
    )


def test_settings_are_made_of_plain_values() -> None:
    plain = {
        "models": {"a": None, "b": {"set": {"model.path": "x"}}},
        "tasks": {
            "t": {
                "data": "x.csv",
                "choices": ["a", "b"],
                "few_shot": {"answer": "x", "hub": {"name": "h"}},
                "generation": {"stop": ["\n"]},
            }
        },
        "seeds": [1, 2],
        "vary": {"sampling.top_p": [None, 0.5]},
    }
    suite = build_settings(Suite, plain)
    assert suite.models == {"a": SuiteModel(), "b": SuiteModel(set={"model.path": "x"})}
    assert suite.tasks["t"] == SuiteTask(
        data="x.csv",
        choices=("a", "b"),
        few_shot=FewShot("x", hub=HubSource("h")),
        generation={"stop": ["\n"]},
    )
    assert (suite.seeds, suite.vary) == ((1, 2), {"sampling.top_p": (None, 0.5)})
