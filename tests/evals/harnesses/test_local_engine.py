"""An engine in the process of a harness, on an event loop of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.core.errors import ConfigError, ModelLoadError, RequestError
from mlxrun.evals.harnesses.local_engine import LocalEngine, load_harness_config

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


def test_names_of_models_and_of_config_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("model: {path: org/own}\nscheduler: {max_running: 3}\n")
    Path("mlxrun.yaml").write_text("scheduler: {max_running: 5}\n")
    own, default = load_harness_config("own.yaml", {}).config, load_harness_config("default", {}).config
    assert (own.model.path, own.scheduler.max_running) == ("org/own", 3)
    assert (default.model.path, default.scheduler.max_running) == ("embedded", 5)
    named = load_harness_config("org/name", {"scheduler.max_running": 7, "model.names": ["a", "b"]}).config
    assert (named.model.path, named.scheduler.max_running, named.model.names) == ("org/name", 7, ("a", "b"))


@pytest.mark.parametrize("sets", [{"scheduler.max_runing": 1}, {"scheduler.max_running": "many"}])
def test_a_wrong_setting_is_named(sets: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(sets))):
        load_harness_config("embedded", sets)


def test_an_engine_is_shared_and_stops_with_its_last_user() -> None:
    loaded = load_harness_config("embedded", {"model.context_length": 512})
    first, second = LocalEngine.open(loaded), LocalEngine.open(loaded)
    assert first is second
    first.close()
    answer = second.answer(CHAT, BODY, "k" * 64).result(60)
    assert answer["choices"][0]["message"]["content"] == "42"
    assert answer == second.answer(CHAT, BODY, "k" * 64).result(60), "also its id, and with the prompt cached"
    with pytest.raises(RequestError, match="^top_k"):
        second.answer(CHAT, BODY | {"top_k": -7}, "k" * 64).result(60)
    second.close()
    assert not second._thread.is_alive() and second.client.dead_error is not None
    third = LocalEngine.open(loaded)
    assert third is not second
    third.close()


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        LocalEngine.open(load_harness_config(str(tmp_path), {}))
    assert not LocalEngine._running
