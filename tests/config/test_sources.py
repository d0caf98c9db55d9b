"""The layers of a config: files and what they extend, variables, flags, paths (config/sources.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.config.loading import load_config
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from tests.helpers.config_files import load, load_errors


def test_extends_is_relative_to_the_file_and_in_order() -> None:
    Path("sub").mkdir()
    Path("sub/one.yaml").write_text("log: {level: debug, format: json}\n")
    Path("sub/two.yaml").write_text("extends: one.yaml\nlog: {level: error}\n")
    Path("three.yaml").write_text("log: {level: warning}\n")
    assert load("extends: [sub/two.yaml, three.yaml]\n").config.log.level == "warning"
    assert load("extends: [three.yaml, sub/two.yaml]\n").config.log.level == "error"
    assert load("extends: [three.yaml, sub/two.yaml]\n").config.log.format == "json"


def test_extends_twice_the_same_is_no_cycle() -> None:
    Path("base.yaml").write_text("log: {level: debug}\n")
    Path("b.yaml").write_text("extends: base.yaml\n")
    assert load("extends: [base.yaml, b.yaml]\n").config.log.level == "debug"


def test_extends_in_a_cycle() -> None:
    Path("b.yaml").write_text("extends: a.yaml\n")
    assert load_errors("extends: b.yaml\n") == [
        "b.yaml:1:10: extends: the files extend each other: a.yaml -> b.yaml -> a.yaml"
    ]


def test_extends_a_missing_file() -> None:
    assert load_errors("extends:\n  - nope.yaml\n") == [
        "a.yaml:2:5: extends: nope.yaml: No such file or directory"
    ]


def test_errors_name_the_extended_file() -> None:
    Path("base.yaml").write_text("log:\n  level: loud\n")
    assert load_errors("extends: base.yaml\nlog: {level: info}\n")[0].startswith(
        "base.yaml:2:10: log.level: 'loud' is not"
    )


def test_a_file_that_is_not_utf8() -> None:
    Path("a.yaml").write_bytes(b"log:\n  level: \xff\n")
    with pytest.raises(ConfigError, match=r"^a.yaml:2:10: the file is not UTF-8$"):
        load_config(Path("a.yaml"))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("foo", "--set foo: it does not have the form section.key=value"),
        ("=1", "--set =1: it does not have the form section.key=value"),
        ("extends=b.yaml", "--set extends: only a file can extend another; use -c"),
        ("media.roots=[", "--set media.roots: this is not YAML: expected the node content"),
        ("policy=fair", "--set policy: unknown key (did you mean 'scheduler.policy'?)"),
        ("engine.probe=false", "--set engine.probe: unknown key (did you mean 'load_check'?)"),
        ("scheduler={polcy: 1}", "--set scheduler: scheduler.polcy: unknown key (did you mean 'policy'?)"),
        ("scheduler.chunk=a", "--set scheduler.chunk: 'a' is not an integer"),
    ],
)
def test_wrong_flags(flag: str, said: str) -> None:
    (line,) = load_errors("", [flag])
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "MLXRUN_SCHEDULER__POLCY",
            "MLXRUN_SCHEDULER__POLCY: scheduler.polcy: unknown key (did you mean 'policy'?)",
        ),
        (
            "MLXRUN_SCHEDULER_POLICY",
            "MLXRUN_SCHEDULER_POLICY: has no effect (did you mean MLXRUN_SCHEDULER__POLICY?)",
        ),
        ("MLXRUN_PLUGINS__PORT", "MLXRUN_PLUGINS__PORT: plugins: unknown key"),
        (
            "MLXRUN_SCHEDULER",
            "MLXRUN_SCHEDULER: has no effect: scheduler is a section; the variable of a key is "
            "MLXRUN_SCHEDULER__KEY",
        ),
    ],
)
def test_wrong_variables(name: str, said: str) -> None:
    assert load_errors("", **{name: "fair"}) == [said]


def test_variables_of_somebody_else_are_left_alone() -> None:
    """A container platform sets MLXRUN_SERVICE_HOST and the like for a service named mlxrun."""
    assert load("", MLXRUN_SERVICE_HOST="10.0.0.1", MLXRUN_PORT="tcp://10.0.0.1:80").config == Config()


def test_text_from_outside_is_taken_by_the_type_of_the_key() -> None:
    loaded = load(
        "",
        ["model.revision=1234", "scheduler.memory_limit=2GiB", "sampling.seed=null", "model.path=a/b"],
        MLXRUN_MODEL__ADAPTER="null",
        MLXRUN_MODEL__NAMES="[a, b]",
    )
    model = loaded.config.model
    assert (model.revision, model.adapter, model.names) == ("1234", None, ("a", "b"))
    assert loaded.config.scheduler.memory_limit == 2 * 1024**3
    assert loaded.config.sampling.seed is None


def test_a_later_flag_hides_no_earlier_one() -> None:
    """Also for the same key, and below it. If both are right, the later one counts."""
    assert load_errors("", ["server.port=abc", "server.port=1"]) == [
        "--set server.port: 'abc' is not an integer"
    ]
    assert load_errors("", ["scheduler={chunk: a}", "scheduler.chunk=64"]) == [
        "--set scheduler: scheduler.chunk: 'a' is not an integer or null"
    ]
    assert load_errors("", ["server=5", "server.port=1"]) == load_errors("", ["server=5"]) != []
    made = load("", ["scheduler={chunk: 64, max_running: 3}", "scheduler.chunk=16", "scheduler.chunk=32"])
    assert (made.config.scheduler.chunk, made.config.scheduler.max_running) == (32, 3)


def test_paths_are_relative_to_what_names_them(tmp_path: Path) -> None:
    for folder in ("sub/model", "sub/lora", "here"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text("{}")
    Path("sub/t.jinja").write_text("")
    Path("sub/base.yaml").write_text("model: {path: model, adapter: ./lora, chat_template: t.jinja}\n")
    model = load("extends: sub/base.yaml\n").config.model
    assert model.path == str(tmp_path / "sub/model")
    assert model.adapter == str(tmp_path / "sub/lora")
    assert model.chat_template == str(tmp_path / "sub/t.jinja")
    assert load("", ["model.path=here"]).config.model.path == str(tmp_path / "here")
    assert load("", MLXRUN_MODEL__PATH="./here").config.model.path == str(tmp_path / "here")
    assert load("model: {path: embedded}\n").config.model.path == "embedded"
    assert load("model: {path: Qwen/Qwen3-0.6B}\n").config.model.path == "Qwen/Qwen3-0.6B"


def test_folders_of_the_server_are_relative_to_what_names_them(tmp_path: Path) -> None:
    Path("sub").mkdir()
    Path("sub/base.yaml").write_text(
        "cache: {backend: disk, disk_path: prefixes}\nserver: {data_path: data, runs_path: ../runs}\n"
    )
    config = load("extends: sub/base.yaml\n").config
    assert config.cache.disk_path == str(tmp_path / "sub/prefixes")
    assert config.server.data_path == str(tmp_path / "sub/data")
    assert config.server.runs_path == str(tmp_path / "runs")


def test_options_of_a_command_are_named_in_their_errors() -> None:
    """A wrong value is reported under the name that was typed; a good one overrides --set."""
    with pytest.raises(ConfigError) as caught:
        load_config(options=[("--port", "server.port", "99999")])
    assert str(caught.value) == "--port: server.port: 99999 is more than 65535"
    loaded = load_config(sets=["server.port=1"], options=[("--port", "server.port", "2")])
    assert (loaded.config.server.port, str(loaded.origins["server.port"])) == (2, "--port")


@pytest.mark.parametrize(
    ("text", "value"), [("cached", "cached"), ("always", "always"), ("true", True), ("false", False)]
)
def test_a_key_may_be_a_word_or_a_switch(text: str, value: object) -> None:
    given = load_config(None, (f"engine.load_check={text}",), {}).config.engine.load_check
    assert given == value and type(given) is type(value)


@pytest.mark.parametrize("text", ["sometimes", "1", "no", "null"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one of 'cached', 'always', true, false"):
        load_config(None, (f"engine.load_check={text}",), {})


def test_an_unknown_user_has_no_home() -> None:
    """Nor has this one in a container for any user."""
    lacks = "~nobody-of-this-name/x: the home folder is unknown; give a full path"
    assert load_errors("extends: ~nobody-of-this-name/x\n") == [f"a.yaml:1:10: {lacks}"]
    assert load_errors("model: {path: ~nobody-of-this-name/x}\n") == [f"a.yaml:1:15: {lacks}"]
