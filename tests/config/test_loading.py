"""How a config is found, read in layers and merged (config/loading.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mlxrun.config.loading import LoadedConfig, load_config
from mlxrun.config.setting_fields import hash_config, list_fields
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from tests.helpers.config_files import load, load_errors


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "scheduler:\nmodel:\n", "{}", "\ufeffversion: 1\n"]
)
def test_an_empty_file_means_the_defaults(text: str) -> None:
    assert load(text).config == Config()


def test_later_layers_win() -> None:
    """The order is defaults < file < environment < --set."""
    Path("base.yaml").write_text("scheduler: {max_running: 1, max_queue: 1, chunk: 64, aging: 1}\n")
    loaded = load(
        "extends: base.yaml\nscheduler: {max_queue: 2, chunk: 128, aging: 2}\n",
        ["scheduler.aging=4"],
        MLXRUN_SCHEDULER__CHUNK="256",
        MLXRUN_SCHEDULER__AGING="3",
    )
    found = loaded.config.scheduler
    assert (found.max_running, found.max_queue, found.chunk, found.aging) == (1, 2, 256, 4.0)
    assert [
        str(loaded.origins[f"scheduler.{key}"]) for key in ("max_running", "max_queue", "chunk", "aging")
    ] == [
        "base.yaml:1:26",
        "a.yaml:2:24",
        "MLXRUN_SCHEDULER__CHUNK",
        "--set scheduler.aging",
    ]
    assert str(loaded.origins["scheduler.policy"]) == "default"
    assert set(loaded.origins) == set(list_fields())


def test_mappings_merge_and_lists_are_replaced() -> None:
    Path("base.yaml").write_text("model: {names: [x, y], chat_template_args: {a: 1, b: 2}}\n")
    model = load(
        "extends: [base.yaml]\nmodel: {names: [z], chat_template_args: {b: 3}}\n",
        ["model.chat_template_args.c=true"],
    ).config.model
    assert model.names == ("z",)
    assert model.chat_template_args == {"a": 1, "b": 3, "c": True}


def test_which_file_is_read(tmp_path: Path) -> None:
    """`-c`, then $MLXRUN_CONFIG, then ./mlxrun.yaml, then the defaults."""
    for name, level in (("c", "debug"), ("env", "error"), ("mlxrun", "warning")):
        Path(f"{name}.yaml").write_text(f"log: {{level: {level}}}\n")
    environ = {"MLXRUN_CONFIG": "env.yaml"}
    assert load_config(Path("c.yaml"), [], environ).config.log.level == "debug"
    assert load_config(None, [], environ).config.log.level == "error"
    assert load_config(None, [], {}).config.log.level == "warning"
    Path("mlxrun.yaml").unlink()
    assert load_config(None, [], {}) == LoadedConfig(
        Config(), load_config(None).origins, hash_config(Config()), None
    )


def test_a_missing_file_says_who_wanted_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^nope.yaml: No such file"):
        load_config(Path("nope.yaml"))
    with pytest.raises(ConfigError, match=r"^MLXRUN_CONFIG: nope.yaml: No such file"):
        load_config(None, [], {"MLXRUN_CONFIG": "nope.yaml"})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_a_mistake_under_an_override_is_still_one() -> None:
    (line,) = load_errors("log: {level: loud}\n", ["log.level=info"])
    assert line.startswith("a.yaml:1:14: log.level: 'loud' is not one of")


def test_no_contradiction_is_made_of_a_wrong_value() -> None:
    assert load_errors("scheduler: {chunk: 4096, prefill_budget: lots}\n") == [
        "a.yaml:1:42: scheduler.prefill_budget: 'lots' is not an integer"
    ]


def test_sampling_defaults_and_model_kind_are_options() -> None:
    """Defaults of the sampler and the kind of the model come from YAML."""
    config = load("sampling: {temperature: 0.2, top_p: 0.5}\nmodel: {kind: text, path: a/b}\n").config
    assert (config.sampling.temperature, config.sampling.top_p, config.model.kind) == (0.2, 0.5, "text")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("").config.log.level = "debug"  # type: ignore[misc]
