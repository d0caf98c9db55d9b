"""The command that starts lm-evaluation-harness; test_lm_eval_model.py runs tasks with it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from mlxrun.core.errors import ConfigError, EngineDead
from mlxrun.evals.harnesses import lm_eval_command


def install(monkeypatch: pytest.MonkeyPatch, evaluate: Any) -> dict[str, str]:
    """A harness whose command is `evaluate`. Returns its table of models."""
    models: dict[str, str] = {}

    class Registry(dict[str, str]):
        def register(self, name: str, target: str) -> None:
            assert name not in models, "a name can be registered once"
            models[name] = self[name] = target

    main, registry = ModuleType("lm_eval.__main__"), ModuleType("lm_eval.api.registry")
    vars(main)["cli_evaluate"] = evaluate
    vars(registry)["model_registry"] = Registry()
    for module in (ModuleType("lm_eval"), main, ModuleType("lm_eval.api"), registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return models


def test_the_model_is_registered_before_the_harness_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    models = install(monkeypatch, lambda: seen.append(dict(models)))
    assert [lm_eval_command.main(), lm_eval_command.main()] == [0, 0]
    assert seen == [{"mlxrun": "mlxrun.evals.harnesses.lm_eval_model:LmEvalModel"}] * 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("scheduler.max_runing: unknown key"), 2),
        (EngineDead("the engine has stopped"), 3),
    ],
)
def test_errors_have_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail() -> None:
        raise error

    install(monkeypatch, fail)
    assert lm_eval_command.main() == code
    assert capsys.readouterr().err == f"mlxrun-lm-eval: {error}\n"


def test_without_the_harness_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert lm_eval_command.main() == 2
    assert "pip install 'lm-eval[api]'" in capsys.readouterr().err
