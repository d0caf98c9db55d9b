"""References to variables, and secrets, which come from nowhere else (config/sources.py)."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from mlxrun.config.schema import build_schema
from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.config.setting_fields import hash_config, to_plain
from tests.helpers.config_files import load, load_errors


def test_references_are_replaced() -> None:
    text = (
        "model:\n  path: ${ORG}/model\n  names: ['${ORG}', '$${ORG}', '$ORG']\n"
        "scheduler: {max_running: '${ROWS}'}\nlog: {level: '${LEVEL}'}\n"
    )
    config = load(text, ["model.revision=${REV}"], ORG="org", ROWS="8", LEVEL="debug", REV="1").config
    assert (config.model.path, config.model.revision) == ("org/model", "1")
    assert config.model.names == ("org", "${ORG}", "$ORG")
    assert (config.scheduler.max_running, config.log.level) == (8, "debug")


def test_a_reference_is_read_as_yaml_where_a_value_may_be_no_text() -> None:
    """A template takes the text `false` for true. Settings that are texts stay texts."""
    text = (
        "model:\n  chat_template_args: {enable_thinking: '${NO}', depth: '${TWO}', style: '${WORD}'}\n"
        "models: {a: {path: embedded, settings: "
        "{scheduler.max_running: '${TWO}', model.revision: '${TWO}'}}}\n"
        "workers: {resources: {GPU: '${TWO}'}}\n"
    )
    config = load(text, NO="false", TWO="2", WORD="terse").config
    assert config.model.chat_template_args == {"enable_thinking": False, "depth": 2, "style": "terse"}
    entry = config.models["a"]
    assert not isinstance(entry, str)
    assert entry.settings == {"scheduler.max_running": 2, "model.revision": "2"}
    assert config.workers.resources == {"GPU": 2}


@pytest.mark.parametrize("form", ["ROWS:-8", "ROWS-8", "ROWS:?is not set", "ROWS:=8", "ROWS+8"])
def test_forms_of_the_shell_are_no_references(form: str) -> None:
    """They were taken for texts, such as the name of a folder. `$$` writes them as text."""
    said = f"${{{form}}}: only ${{NAME}} and ${{file:/PATH}} are replaced; write $${{...}} for this text"
    assert load_errors(f"server: {{data_path: '${{{form}}}'}}\n", ROWS="1") == [
        f"a.yaml:1:21: server.data_path: {said}"
    ]
    assert load(f"model: {{names: ['$${{{form}}}']}}\n").config.model.names == (f"${{{form}}}",)


def test_a_reference_in_extends() -> None:
    Path("base.yaml").write_text("log: {level: debug}\n")
    assert load("extends: ${WHICH}.yaml\n", WHICH="base").config.log.level == "debug"


def test_a_file_as_a_reference(tmp_path: Path) -> None:
    """For secrets that a service manager writes there; the text may be read again."""
    (tmp_path / "key").write_text(" hunter2\n")
    (tmp_path / "rows").write_text("8\n")
    text = f"server: {{api_keys: {{a: '${{file:{tmp_path}/key}}'}}}}\n"
    text += f"scheduler: {{max_running: '${{file:{tmp_path}/rows}}'}}\nmodel: {{names: ['$${{file:/x}}']}}\n"
    config = load(text).config
    assert config.server.api_keys == {"a": "hunter2"}
    assert (config.scheduler.max_running, config.model.names) == (8, ("${file:/x}",))
    (tmp_path / "key").write_text("other")
    assert load(text).config.server.api_keys == {"a": "other"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("key", "key is not an absolute path, which ${file:...} needs"),
        ("/none/key", "/none/key: No such file or directory"),
        ("/dev/null", "/dev/null: it is a device, not a regular file"),
    ],
)
def test_a_file_that_cannot_be_read(path: str, said: str) -> None:
    text = f"server: {{api_keys: {{a: '${{file:{path}}}'}}}}\n"
    assert load_errors(text) == [f"a.yaml:1:24: server.api_keys.a: {said}"]


def test_a_missing_variable() -> None:
    assert load_errors("scheduler:\n  max_running: ${ROWS}\n") == [
        "a.yaml:2:16: scheduler.max_running: the environment variable ROWS is not set"
    ]


def test_api_keys_come_from_variables_and_are_not_printed() -> None:
    text = "server:\n  api_keys:\n    alice: ${A}\n    bob: ${B}\n"
    config = load(text, A="hunter2", B="12345").config
    assert config.server.api_keys == {"alice": "hunter2", "bob": "12345"}
    assert to_plain(config)["server"]["api_keys"] == {"alice": "***", "bob": "***"}
    assert hash_config(config) == hash_config(load(text, A="other", B="one").config)
    assert load_errors("server:\n  api_keys:\n    alice: hunter2\n") == [
        "a.yaml:3:12: server.api_keys.alice: this is a secret; "
        "write ${NAME} here and set the environment variable NAME, or write ${file:/PATH}"
    ]
    assert load("", MLXRUN_SERVER__API_KEYS__CAROL="hunter2").config.server.api_keys == {"carol": "hunter2"}


def test_api_keys_with_roles_are_read_from_every_source_and_not_printed() -> None:
    text = "server:\n  api_keys:\n    a: ${A}\n    b: {key: '${B}', role: '${ROLE}'}\n    a.role: ${C}\n"
    more = {"A": "1a", "B": "2b", "C": "3c", "ROLE": "metrics", "MLXRUN_SERVER__API_KEYS__D": "{key: 4d}"}
    loaded = load(text, ["server.api_keys.d.role=admin", "server.api_keys.e.key=${A}5"], **more)
    assert loaded.config.server.api_keys == {
        "a": "1a",
        "b": ApiKeySettings("2b", "metrics"),
        "a.role": "3c",
        "d": ApiKeySettings("4d", "admin"),
        "e": ApiKeySettings("1a5"),
    }
    shown = {"b": {"key": "***", "role": "metrics"}, "d": {"key": "***", "role": "admin"}}
    plain = to_plain(loaded.config)["server"]["api_keys"]
    assert plain == shown | {"a": "***", "a.role": "***", "e": {"key": "***"}}
    jsonschema.validate({"server": {"api_keys": plain}}, build_schema())
    other = load(text, ["server.api_keys.d.role=metrics", "server.api_keys.e.key=${A}5"], **more)
    assert loaded.digest != other.digest


def test_a_secret_is_not_written_down() -> None:
    assert load_errors("server:\n  api_keys:\n    a: ${T}\n    b: x${T}\n    c: hunter2\n", T="other") == [
        "a.yaml:5:8: server.api_keys.c: this is a secret; "
        "write ${NAME} here and set the environment variable NAME, or write ${file:/PATH}"
    ]


def test_a_wrong_secret_is_not_quoted() -> None:
    for text in ("{a: 12345}", "'${TOKEN}'", "[hunter2, 12345]"):
        said = "\n".join(load_errors(f"server: {{api_keys: {text}}}\n", TOKEN="hunter2"))
        assert "server.api_keys" in said and ": *** is not a " in said
        assert "hunter2" not in said and "12345" not in said
