"""The configs of several models, and what each gets of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxrun.cli.commands.config import check
from mlxrun.cli.model_process import measure_need
from mlxrun.cli.models_setup import list_memory_problems, load_model_configs, number_models, share_memory
from mlxrun.config.loading import load_config
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ConfigError
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo

TEXT = """
models:
  chat: embedded
  coder:
    path: ./coder
    names: ["gpt-4o", "$x"]
    adapters: {sql: ./sql}
    settings: {sampling.temperature: 0, model.chat_template: t.jinja}
sampling: {max_tokens: 7, temperature: 0.5}
"""


def write(folder: Path, text: str) -> Path:
    for name in ("coder", "sql"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "t.jinja").write_text("x")
    path = folder / "m.yaml"
    path.write_text(text)
    return path


def test_each_model_has_the_config_with_its_own_settings(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, TEXT), ["sampling.top_k=3"])
    found = load_model_configs(loaded)
    chat, coder = found["chat"], found["coder"]
    assert chat.model.path == "embedded" and chat.model.names == ("chat",) and not chat.models
    assert coder.model.path == str(tmp_path / "coder") and coder.model.names == ("coder", "gpt-4o", "$x")
    assert coder.model.adapters == {"sql": str(tmp_path / "sql")}
    assert coder.model.chat_template == str(tmp_path / "t.jinja")
    assert [each.sampling.temperature for each in (chat, coder)] == [0.5, 0.0]
    assert {each.sampling.max_tokens for each in (chat, coder)} == {7}
    assert {each.sampling.top_k for each in (chat, coder)} == {3}
    assert not coder.apis.batches and not coder.apis.ui


def test_the_errors_of_all_models_have_their_places(tmp_path: Path) -> None:
    text = """models:
  chat: {path: embedded, settings: {sampling.temperature: -1}}
  other:
    path: embedded
    settings:
      scheduler.prefill_budget: 256
      scheduler.chunk: 512
"""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_model_configs(load_config(path))
    assert error.value.problems == (
        f"{path}:2:59: sampling.temperature: -1 is less than 0 (models.chat)",
        f"{path}:7:24: scheduler.chunk: chunk 512 is more than prefill_budget 256 (models.other)",
    )


def test_memory_for_less_than_the_weights_is_found_by_the_check_of_a_config(tmp_path: Path) -> None:
    path = write(
        tmp_path, "models:\n  chat:\n    path: embedded\n    memory: 1MB\n  hub: {path: A/b, memory: 1}\n"
    )
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(check, [str(path)], catch_exceptions=False, standalone_mode=False)
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}:4:13: models.chat.memory: 1.0 MB are less than its weights")


def test_a_limit_below_a_model_is_found_by_the_check_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, "models:\n  chat: embedded\nscheduler: {memory_limit: 2MB}\n")
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(check, [str(path)], catch_exceptions=False, standalone_mode=False)
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}:3:13: scheduler.memory_limit: model chat needs ")
    assert ", and 2.0 MB may be used; its weights alone are " in problem


def test_a_limit_below_one_model_is_found_by_the_check_of_a_config(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: embedded}\nscheduler: {memory_limit: 2MB}\n")
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(check, [str(path)], catch_exceptions=False, standalone_mode=False)
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}:2:13: scheduler.memory_limit: weights ")
    assert problem.endswith(" > limit 2.0 MB: no request can ever run")
    for model, limit in (("embedded", "2GB"), ("A/b", "1")):
        path = write(tmp_path, f"model: {{path: {model}}}\nscheduler: {{memory_limit: {limit}}}\n")
        CliRunner().invoke(check, [str(path)], catch_exceptions=False, standalone_mode=False)


def test_images_that_leave_no_room_are_found_by_the_check_of_a_config(tmp_path: Path, zoo: Zoo) -> None:
    """As the load finds them: the weights by themselves fit."""
    text = f"model: {{path: {zoo.vision('qwen2_5_vl')}}}\nscheduler: {{memory_limit: 2GB}}\n"
    path = write(tmp_path, text)
    CliRunner().invoke(check, [str(path)], catch_exceptions=False, standalone_mode=False)
    path = write(tmp_path, f"{text}cache: {{image_bytes: 1.8GB}}\n")
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(check, [str(path)], catch_exceptions=False, standalone_mode=False)
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}:2:13: scheduler.memory_limit: weights ")
    assert " + cache.image_bytes 1.8 GB + " in problem and problem.endswith(": no request can ever run")


@pytest.mark.parametrize(
    ("entry", "shares", "limit", "start"),
    [
        ("{path: embedded}", {"a": 9}, 8, "3:13: scheduler.memory_limit: model a needs 9 B, and 8 B"),
        ("{path: embedded, memory: 9}", {"a": 9}, 8, "2:31: models.a.memory: it needs 9 B, and 8 B"),
        ("{path: embedded, memory: 1}", {"a": 1}, 8, "2:31: models.a.memory: 1 B are less than its weights"),
    ],
)
def test_what_is_wrong_is_said_at_the_key_that_is_in_the_file(
    entry: str, shares: dict[str, int], limit: int, start: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f"models:\n  a: {entry}\nscheduler: {{memory_limit: 20GB}}\n")
    (problem,) = list_memory_problems(load_config(path), shares, {"a": 3}, limit)
    assert problem.startswith(f"{path}:{start}")


@pytest.mark.parametrize(
    ("needs", "given", "pinned", "limit", "shares"),
    [
        ([2, 3], [None, None], [False, False], 10, [4, 5]),  # both fit, and share the rest
        ([2, 3], [6, None], [False, False], 10, [6, 4]),
        ([6, 6], [None, None], [False, False], 10, [10, 10]),  # never together
        ([6, 6], [6, 6], [False, False], 10, [6, 6]),
        ([1, 6, 6], [None] * 3, [True, False, False], 10, [1, 9, 9]),
        ([2, 3, 7], [None] * 3, [False] * 3, 10, [2, 3, 7]),  # two of three fit
        ([20, 1], [None, None], [False, False], 10, [20, 10]),  # too large, which is said later
    ],
)
def test_memory_is_shared(
    needs: list[int], given: list[int | None], pinned: list[bool], limit: int, shares: list[int]
) -> None:
    assert share_memory(needs, given, pinned, limit) == shares


def test_a_model_keeps_its_number_when_others_come_and_go() -> None:
    assert number_models(["b"]) == number_models(["a", "b"])[1:]
    many = number_models(f"model-{number}" for number in range(500))
    assert len(set(many)) == 500 and max(many) < 4096


def test_a_model_needs_its_weights_and_its_rows() -> None:
    config = Config(model=ModelSettings(path="embedded"))
    info = load_model_info(config.model, weights=False, announce=False)
    needed, weights, shortage = measure_need(config, info)
    assert 5_000_000 < weights < needed < 3_000_000_000 and shortage is None
