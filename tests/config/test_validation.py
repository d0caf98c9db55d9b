"""Every error of a config is reported with its position and a suggestion (config/validation.py)."""

from __future__ import annotations

import json

import pytest

from mlxrun.config import validation
from mlxrun.config.loading import load_config
from mlxrun.config.nodes import Origin
from mlxrun.config.yaml_source import parse_value
from mlxrun.core.errors import ConfigError
from tests.helpers.config_files import load_errors


def test_every_error_at_once_with_its_place() -> None:
    """Each line has file:line:column, the key, what was expected, and a suggestion."""
    text = """\
model:
  revision: 12
scheduler:
  policy: fcsf
  polcy: fair
  max_running: many
  memory_limit: 4 gigs
  memory_headroom: 2
temperature: 1
sampling:
  polcy: fair
media:
  allow_urls: yes
  allow_hosts: a.example
"""
    assert load_errors(text, ["engine.max_errors=0"], MLXRUN_BATCH__ORDER="inptu") == [
        'a.yaml:2:13: model.revision: 12 is not a string or null (write "12")',
        "a.yaml:4:11: scheduler.policy: 'fcsf' is not one of 'fcfs', 'priority', 'shortest', 'fair'"
        " (did you mean 'fcfs'?)",
        "a.yaml:5:3: scheduler.polcy: unknown key (did you mean 'policy'?)",
        "a.yaml:6:16: scheduler.max_running: 'many' is not an integer",
        "a.yaml:7:17: scheduler.memory_limit: '4 gigs' is not a byte size such as 4GB or 512MiB",
        "a.yaml:8:20: scheduler.memory_headroom: 2 is more than 0.9",
        "a.yaml:9:1: temperature: unknown key (did you mean 'sampling.temperature'?)",
        "a.yaml:11:3: sampling.polcy: unknown key (did you mean 'scheduler.policy'?)",
        "a.yaml:13:15: media.allow_urls: 'yes' is not true or false (did you mean true?)",
        "a.yaml:14:16: media.allow_hosts: 'a.example' is not a list (write [a.example])",
        "MLXRUN_BATCH__ORDER: batch.order: 'inptu' is not one of 'completion', 'input'"
        " (did you mean 'input'?)",
        "--set engine.max_errors: 0 is less than 1",
    ]


def test_the_first_unknown_keys_have_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with thousands is refused within seconds: none is looked for beyond those that are shown."""
    looked_for: list[str] = []
    monkeypatch.setattr(validation, "find_closest", lambda key, words: looked_for.append(key))
    monkeypatch.setattr(validation, "MOST_SUGGESTED", 3)
    text = "b1: 1\nscheduler: {b2: 1, b3: 1}\nb4: 1\n" + "".join(f"c{n}: 1\n" for n in range(50))
    assert len(load_errors(text)) == 54
    assert list(dict.fromkeys(looked_for)) == ["b1", "b2", "b3"]


@pytest.mark.parametrize("value", ["*", "a, b", "null", "1", "it's: #1", "]", "a\nb", "a.example"])
def test_the_list_that_was_meant_is_yaml(value: str) -> None:
    """What the hint says to write is read as a list of this value."""
    (said,) = load_errors(f"server: {{cors_origins: {json.dumps(value)}}}")
    assert said.endswith(")") and "server.cors_origins" in said
    hint = said.split("(write ")[1][:-1]
    assert parse_value(hint, "", Origin("file"), []).strip_origins() == [value]


@pytest.mark.parametrize("section", ["tracing", "plugins"])
def test_sections_that_nothing_reads_are_unknown_keys(section: str) -> None:
    """Only sections that code reads are declared."""
    assert load_errors(f"{section}:\n  port: 1\n") == [f"a.yaml:1:1: {section}: unknown key"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model: {path: [",
            "a.yaml:1:16: this is not YAML: expected the node content, but found '<stream end>'",
        ),
        ("a: b: c\n", "a.yaml:1:5: this is not YAML: mapping values are not allowed here"),
        (
            "log:\n\tlevel: info\n",
            "a.yaml:2:1: this is not YAML: found character '\\t' that cannot start any token",
        ),
        ("log: {level: \x07}\n", "a.yaml:1:14: this is not YAML: there is a character that is not allowed"),
        ("--- {}\n--- {}\n", "a.yaml:2:1: a second YAML document (---) begins here: only one is allowed"),
        ("[a]\n", "a.yaml:1:1: the file must be a mapping of keys, and is a list"),
        ("log: &a {level: *a}\n", "a.yaml:1:6: log.level: this alias contains itself"),
        ("model: {path: !!binary aa}\n", "a.yaml:1:15: model.path: 'aa' cannot be read as binary"),
        ("1: 2\n", "a.yaml:1:1: a key must be a string, not '1'"),
        ("[a]: 2\n", "a.yaml:1:1: a key must be a string, not a list or a mapping"),
        (
            "log:\n  level: info\n  level: error\n",
            "a.yaml:3:3: log.level: this key has a value at a.yaml:2:3 already",
        ),
        ("log: 3\n", "a.yaml:1:6: log: 3 is not a mapping of keys"),
        ("model: a\n", "a.yaml:1:8: model: 'a' is not a mapping of keys (did you mean model.path: a?)"),
        ("version: 2\n", "a.yaml:1:10: version: 2 is not one of 1"),
        ("model: {path: ''}\n", "a.yaml:1:15: model.path: it is an empty string"),
        ("media: {roots: [a, a]}\n", 'a.yaml:1:16: media.roots: ["a", "a"] has an item twice'),
        ("media: {roots: [a, 1]}\n", 'a.yaml:1:20: media.roots.1: 1 is not a string (write "1")'),
        ("media: {max_bytes: 0B}\n", "a.yaml:1:20: media.max_bytes: '0B' is less than 1"),
        ("media: {timeout: .nan}\n", "a.yaml:1:18: media.timeout: '.nan' is not a number"),
        ("media: {timeout: 1e999}\n", "a.yaml:1:18: media.timeout: '1e999' cannot be read as float"),
        ("engine: {max_errors: true}\n", "a.yaml:1:22: engine.max_errors: true is not an integer"),
        ("engine: {max_errors: 1.5}\n", "a.yaml:1:22: engine.max_errors: 1.5 is not an integer"),
        (
            "model: {chat_template_args: {a: [1]}}\n",
            "a.yaml:1:33: model.chat_template_args.a: [1] is not a string or",
        ),
        ("extends: 3\n", "a.yaml:1:10: extends: 3 is not a string or a list"),
        (
            "server: {port: ${PORT}}\n",
            "a.yaml:1:17: this is not YAML: expected ',' or '}', but got '{' (write quotes around ${NAME} "
            "within braces and brackets)",
        ),
        (
            "log: &a\n  level: info\nmodel:\n  <<: *a\n",
            "a.yaml:4:3: model.<<: YAML 1.2 has no merge keys: write the keys themselves",
        ),
        ("model.path: a\n", "a.yaml:1:1: model.path: unknown key (did you mean model: {path: ...}?)"),
        (
            "models: {a: {path: embedded, settings: {sampling: {seed: 1}}}}\n",
            'a.yaml:1:51: models.a.settings.sampling: {"seed": 1} is not a string or an integer or a number '
            "or true or false (write sampling.KEY: VALUE for each key)",
        ),
    ],
)
def test_wrong_files(text: str, said: str) -> None:
    (line,) = load_errors(text)
    assert line.startswith(said)


def test_a_name_that_is_no_text() -> None:
    """As a folder on Linux may have one."""
    with pytest.raises(ConfigError) as found:
        load_config(None, ["model.path=./caf\udce9"])
    assert found.value.problems == ("--set model.path: it is not UTF-8 text",)
