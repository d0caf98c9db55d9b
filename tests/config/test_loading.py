"""The config: layers, places, messages, references, contradictions; every option is read (A66, A67)."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import mlxrun
from mlxrun.config.byte_sizes import format_bytes, parse_bytes
from mlxrun.config.contradictions import CHECKS
from mlxrun.config.conversion import build, config_hash, to_plain
from mlxrun.config.generate import generated
from mlxrun.config.loading import Loaded, load_config, raise_all, resolve
from mlxrun.config.nodes import ConfigProblem
from mlxrun.config.schema import schema_of
from mlxrun.config.setting_fields import fields_of, sections_of
from mlxrun.config.settings import Config, Secret
from mlxrun.config.yaml_source import scalar_of, yaml_text
from mlxrun.errors import ConfigError

PACKAGE = Path(mlxrun.__file__).parent
CONFIGS = PACKAGE.parent / "configs"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, sets: Sequence[str] = (), **environ: str) -> Loaded:
    """The config of a file `a.yaml` with this text."""
    Path("a.yaml").write_text(text)
    return load_config(Path("a.yaml"), sets, environ)


def errors(text: str, sets: Sequence[str] = (), **environ: str) -> list[str]:
    """The lines of the error that this file gives."""
    with pytest.raises(ConfigError) as caught:
        load(text, sets, **environ)
    return str(caught.value).splitlines()


# Layers


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "scheduler:\nmodel:\n", "{}", "\ufeffversion: 1\n"]
)
def test_an_empty_file_means_the_defaults(text: str) -> None:
    assert load(text).config == Config()


def test_later_layers_win() -> None:
    """design 12: defaults < file < environment < --set."""
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
    assert set(loaded.origins) == set(fields_of())


def test_mappings_merge_and_lists_are_replaced() -> None:
    Path("base.yaml").write_text("model: {names: [x, y], chat_template_args: {a: 1, b: 2}}\n")
    model = load(
        "extends: [base.yaml]\nmodel: {names: [z], chat_template_args: {b: 3}}\n",
        ["model.chat_template_args.c=true"],
    ).config.model
    assert model.names == ("z",)
    assert model.chat_template_args == {"a": 1, "b": 3, "c": True}


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
    assert errors("extends: b.yaml\n") == ["b.yaml:1:10: extends: a cycle: a.yaml -> b.yaml -> a.yaml"]


def test_extends_a_missing_file() -> None:
    assert errors("extends:\n  - nope.yaml\n") == [
        "a.yaml:2:5: extends: nope.yaml: No such file or directory"
    ]


def test_errors_name_the_extended_file() -> None:
    Path("base.yaml").write_text("log:\n  level: loud\n")
    assert errors("extends: base.yaml\nlog: {level: info}\n")[0].startswith(
        "base.yaml:2:10: log.level: 'loud' is not"
    )


def test_which_file_is_read(tmp_path: Path) -> None:
    """`-c`, then $MLXRUN_CONFIG, then ./mlxrun.yaml, then the defaults."""
    for name, level in (("c", "debug"), ("env", "error"), ("mlxrun", "warning")):
        Path(f"{name}.yaml").write_text(f"log: {{level: {level}}}\n")
    environ = {"MLXRUN_CONFIG": "env.yaml"}
    assert load_config(Path("c.yaml"), [], environ).config.log.level == "debug"
    assert load_config(None, [], environ).config.log.level == "error"
    assert load_config(None, [], {}).config.log.level == "warning"
    Path("mlxrun.yaml").unlink()
    assert load_config(None, [], {}) == Loaded(
        Config(), load_config(None).origins, config_hash(Config()), None
    )


def test_a_missing_file_says_who_wanted_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^nope.yaml: No such file"):
        load_config(Path("nope.yaml"))
    with pytest.raises(ConfigError, match=r"^MLXRUN_CONFIG: nope.yaml: No such file"):
        load_config(None, [], {"MLXRUN_CONFIG": "nope.yaml"})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


# Errors


def test_every_error_at_once_with_its_place() -> None:
    """design 12, A66: file:line:col, the key, what was expected, a suggestion."""
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
    assert errors(text, ["engine.max_errors=0"], MLXRUN_BATCH__ORDER="inptu") == [
        'a.yaml:2:13: model.revision: 12 is not a string or null (write "12")',
        "a.yaml:4:11: scheduler.policy: 'fcsf' is not one of 'fcfs', 'priority', 'shortest', 'fair'"
        " (did you mean 'fcfs'?)",
        "a.yaml:5:3: scheduler.polcy: unknown key (did you mean 'policy'?)",
        "a.yaml:6:16: scheduler.max_running: 'many' is not an integer",
        "a.yaml:7:17: scheduler.memory_limit: '4 gigs' is not a size such as 4GB or 512MiB",
        "a.yaml:8:20: scheduler.memory_headroom: 2 is more than 0.9",
        "a.yaml:9:1: temperature: unknown key (did you mean 'sampling.temperature'?)",
        "a.yaml:11:3: sampling.polcy: unknown key (did you mean 'scheduler.policy'?)",
        "a.yaml:13:15: media.allow_urls: 'yes' is not true or false (did you mean true?)",
        "a.yaml:14:16: media.allow_hosts: 'a.example' is not a list (write [a.example])",
        "MLXRUN_BATCH__ORDER: batch.order: 'inptu' is not one of 'completion', 'input'"
        " (did you mean 'input'?)",
        "--set engine.max_errors: 0 is less than 1",
    ]


@pytest.mark.parametrize("section", ["embeddings", "plugins"])
def test_sections_that_nothing_reads_are_unknown_keys(section: str) -> None:
    """Only what code reads is declared."""
    assert errors(f"{section}:\n  port: 1\n") == [f"a.yaml:1:1: {section}: unknown key"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: [", "a.yaml:1:16: not YAML: expected the node content, but found '<stream end>'"),
        ("a: b: c\n", "a.yaml:1:5: not YAML: mapping values are not allowed here"),
        ("log:\n\tlevel: info\n", "a.yaml:2:1: not YAML: found character '\\t' that cannot start any token"),
        ("log: {level: \x07}\n", "a.yaml:1:14: not YAML: a character that is not allowed"),
        ("--- {}\n--- {}\n", "a.yaml:2:1: not YAML: but found another document"),
        ("[a]\n", "a.yaml:1:1: a config is a mapping of sections"),
        ("log: &a {level: *a}\n", "a.yaml:1:6: log.level: an alias that holds itself"),
        ("model: {path: !!binary aa}\n", "a.yaml:1:15: model.path: 'aa' cannot be read as binary"),
        ("1: 2\n", "a.yaml:1:1: a key must be a string, not '1'"),
        ("[a]: 2\n", "a.yaml:1:1: a key must be a string, not a list or a mapping"),
        ("log:\n  level: info\n  level: error\n", "a.yaml:3:3: log.level: given twice, first at a.yaml:2:3"),
        ("log: 3\n", "a.yaml:1:6: log: 3 is not a mapping of keys"),
        ("version: 2\n", "a.yaml:1:10: version: 2 is not one of 1"),
        ("model: {path: ''}\n", "a.yaml:1:15: model.path: an empty string"),
        ("media: {roots: [a, a]}\n", 'a.yaml:1:16: media.roots: ["a", "a"] holds an item twice'),
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
    ],
)
def test_wrong_files(text: str, said: str) -> None:
    (line,) = errors(text)
    assert line.startswith(said)


def test_a_file_that_is_not_utf8() -> None:
    Path("a.yaml").write_bytes(b"log:\n  level: \xff\n")
    with pytest.raises(ConfigError, match=r"^a.yaml:2:10: not UTF-8$"):
        load_config(Path("a.yaml"))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("foo", "--set foo: not of the form section.key=value"),
        ("=1", "--set =1: not of the form section.key=value"),
        ("extends=b.yaml", "--set extends: only a file can extend another; use -c"),
        ("media.roots=[", "--set media.roots: not YAML: expected the node content"),
        ("policy=fair", "--set policy: unknown key (did you mean 'scheduler.policy'?)"),
        ("scheduler={polcy: 1}", "--set scheduler: scheduler.polcy: unknown key (did you mean 'policy'?)"),
        ("scheduler.chunk=a", "--set scheduler.chunk: 'a' is not an integer"),
    ],
)
def test_wrong_flags(flag: str, said: str) -> None:
    (line,) = errors("", [flag])
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
            "MLXRUN_SCHEDULER_POLICY: does nothing (did you mean MLXRUN_SCHEDULER__POLICY?)",
        ),
        ("MLXRUN_PLUGINS__PORT", "MLXRUN_PLUGINS__PORT: plugins: unknown key"),
    ],
)
def test_wrong_variables(name: str, said: str) -> None:
    assert errors("", **{name: "fair"}) == [said]


def test_variables_of_somebody_else_are_left_alone() -> None:
    """A container platform sets MLXRUN_SERVICE_HOST and the like for a service named mlxrun."""
    assert load("", MLXRUN_SERVICE_HOST="10.0.0.1", MLXRUN_PORT="tcp://10.0.0.1:80").config == Config()


def test_a_mistake_under_an_override_is_still_one() -> None:
    (line,) = errors("log: {level: loud}\n", ["log.level=info"])
    assert line.startswith("a.yaml:1:14: log.level: 'loud' is not one of")


# Values


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


def test_values_have_the_type_of_their_field() -> None:
    config = load(
        "scheduler: {aging: 5, chunk: 64.0}\nmedia: {max_bytes: 1.5kB}\nsampling: {top_p: 1e-1}\n"
    ).config
    assert [type(value) for value in (config.scheduler.aging, config.scheduler.chunk)] == [float, int]
    assert config.media.max_bytes == 1500
    assert config.sampling.top_p == 0.1


def test_yaml_1_2_scalars() -> None:
    found = [
        scalar_of(text)
        for text in ("no", "12:30", "0x1F", "0o17", "017", "-2", "1.", "~", "", "null", "True", "2024-01-01")
    ]
    assert found == ["no", "12:30", 31, 15, 17, -2, 1.0, None, None, None, True, "2024-01-01"]


@given(
    st.one_of(
        st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_values_survive_being_written(value: str | int | bool | None | float) -> None:
    text = yaml_text([value])
    assert len(text.splitlines()) == 1
    Path("v.yaml").write_text(f"model: {{names: {text}}}\n", encoding="utf-8", newline="")
    if isinstance(value, str) and value and "${" not in value:
        assert load_config(Path("v.yaml")).config.model.names == (value,)
    else:
        assert yaml.safe_load(text) == [value] or isinstance(value, float)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4 GiB", 4 * 2**30),
        ("512mib", 512 * 2**20),
        ("1.5kB", 1500),
        ("7B", 7),
        ("2TiB", 2 * 2**40),
    ],
)
def test_byte_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    jsonschema.validate({"media": {"max_bytes": text}}, schema_of())


@pytest.mark.parametrize("text", ["4", "GB", "-1GB", "4 gigs", "4GBs", "", "1e3B"])
def test_what_is_no_byte_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)
    assert not jsonschema.Draft202012Validator(schema_of()).is_valid({"media": {"max_bytes": text}})


@given(st.integers(0, 2**60))
def test_byte_sizes_are_written_exactly(size: int) -> None:
    text = format_bytes(size)
    assert (int(text) if text.isdigit() else parse_bytes(text)) == size


# References and secrets


def test_references_are_replaced() -> None:
    text = (
        "model:\n  path: ${ORG}/model\n  names: ['${ORG}', '$${ORG}', '$ORG']\n"
        "scheduler: {max_running: '${ROWS}'}\nlog: {level: '${LEVEL}'}\n"
    )
    config = load(text, ["model.revision=${REV}"], ORG="org", ROWS="8", LEVEL="debug", REV="1").config
    assert (config.model.path, config.model.revision) == ("org/model", "1")
    assert config.model.names == ("org", "${ORG}", "$ORG")
    assert (config.scheduler.max_running, config.log.level) == (8, "debug")


def test_a_reference_in_extends() -> None:
    Path("base.yaml").write_text("log: {level: debug}\n")
    assert load("extends: ${WHICH}.yaml\n", WHICH="base").config.log.level == "debug"


def test_a_missing_variable() -> None:
    assert errors("scheduler:\n  max_running: ${ROWS}\n") == [
        "a.yaml:2:16: scheduler.max_running: the variable ROWS is not set"
    ]


@dataclass(frozen=True)
class KeySettings:
    """Has a secret."""

    token: Annotated[str | None, Secret()] = None
    """A token."""
    tokens: Annotated[tuple[str, ...], Secret()] = ()
    """Tokens."""


@dataclass(frozen=True)
class SecretConfig:
    """A config with secrets of both kinds that mlxrun's own does not have."""

    keys: KeySettings = field(default_factory=KeySettings)


def load_secret(text: str, **environ: str) -> SecretConfig:
    Path("a.yaml").write_text(text)
    problems: list[ConfigProblem] = []
    resolved = resolve(SecretConfig, Path("a.yaml"), [], environ, problems)
    raise_all(problems)
    return resolved.config


def test_secrets_come_from_variables_and_are_not_printed() -> None:
    config = load_secret("keys: {token: '${TOKEN}', tokens: ['${TOKEN}', 'x${TOKEN}']}\n", TOKEN="hunter2")
    assert config.keys == KeySettings("hunter2", ("hunter2", "xhunter2"))
    assert to_plain(config) == {"keys": {"token": "***", "tokens": "***"}}
    assert load_secret("", MLXRUN_KEYS__TOKEN="hunter2").keys.token == "hunter2"


def test_a_secret_is_not_written_down() -> None:
    with pytest.raises(ConfigError) as caught:
        load_secret("keys:\n  token: hunter2\n  tokens: ['${T}', hunter2]\n", T="other")
    assert str(caught.value).splitlines() == [
        "a.yaml:2:10: keys.token: a secret; write ${NAME} and set that variable",
        "a.yaml:3:20: keys.tokens.1: a secret; write ${NAME} and set that variable",
    ]


def test_a_wrong_secret_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        load_secret("keys: {tokens: '${TOKEN}', token: 12345}\n", TOKEN="hunter2")
    assert "hunter2" not in str(caught.value)
    assert "12345" not in str(caught.value)
    assert "a.yaml:1:16: keys.tokens: *** is not a list" in str(caught.value)


def test_api_keys_come_from_variables_and_are_not_printed() -> None:
    text = "server:\n  api_keys:\n    alice: ${A}\n    bob: ${B}\n"
    config = load(text, A="hunter2", B="12345").config
    assert config.server.api_keys == {"alice": "hunter2", "bob": "12345"}
    assert to_plain(config)["server"]["api_keys"] == {"alice": "***", "bob": "***"}
    assert config_hash(config) == config_hash(load(text, A="other", B="one").config)
    assert errors("server:\n  api_keys:\n    alice: hunter2\n") == [
        "a.yaml:3:12: server.api_keys.alice: a secret; write ${NAME} and set that variable"
    ]
    assert load("", MLXRUN_SERVER__API_KEYS__CAROL="hunter2").config.server.api_keys == {"carol": "hunter2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{alice: '${EMPTY}'}", "a.yaml:1:28: server.api_keys.alice: an empty string"),
        ("{alice: '${A}', bob: '${A}'}", "a.yaml:1:20: server.api_keys: two names have the same key"),
        (
            "{'a b': '${A}'}",
            "a.yaml:1:20: server.api_keys: 'a b' is no name of letters, digits, '.', '_' and '-'",
        ),
        (
            "{alice: ' ${A}'}",
            "a.yaml:1:20: server.api_keys: the key of alice has space at its ends, which no client sends",
        ),
        ("['${A}']", "a.yaml:1:20: server.api_keys: *** is not a mapping"),
        ("{alice: [1]}", "a.yaml:1:28: server.api_keys.alice: *** is not a string"),
    ],
)
def test_wrong_api_keys(text: str, said: str) -> None:
    assert errors(f"server: {{api_keys: {text}}}\n", A="hunter2", EMPTY="") == [said]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.example"])
def test_a_public_address_needs_keys_or_a_word(host: str) -> None:
    (said,) = errors(f"server: {{host: '{host}'}}\n")
    assert said.startswith(f"a.yaml:1:16: server.host: {host} can be reached from other machines")
    assert load(f"server: {{host: '{host}', allow_public: true}}\n").config.server.host == host
    assert load(f"server: {{host: '{host}', api_keys: {{a: '${{A}}'}}}}\n", A="x").config.server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_no_keys(host: str) -> None:
    assert load(f"server: {{host: '{host}'}}\n").config.server.host == host


def test_hosts_are_hosts() -> None:
    """A66: what the server would refuse at its start is found by a check of the file. The twin is taken."""
    assert load("server: {allowed_hosts: ['*', AI.example.com, '[::1]', 10.0.0.7, localhost.]}\n")
    for name in ("http://a.example", "a.example:443", "*.example", "a b"):
        (said,) = errors(f"server: {{allowed_hosts: [ok.example, '{name}']}}\n")
        assert said.startswith(f"a.yaml:1:25: server.allowed_hosts: {name!r} is neither a name"), said


def test_a_later_flag_hides_no_earlier_one() -> None:
    """A66: also for the same key, and below it. The twin: where both are right the later one counts."""
    assert errors("", ["server.port=abc", "server.port=1"]) == ["--set server.port: 'abc' is not an integer"]
    assert errors("", ["scheduler={chunk: a}", "scheduler.chunk=64"]) == [
        "--set scheduler: scheduler.chunk: 'a' is not an integer or null"
    ]
    assert errors("", ["server=5", "server.port=1"]) == errors("", ["server=5"]) != []
    made = load("", ["scheduler={chunk: 64, max_running: 3}", "scheduler.chunk=16", "scheduler.chunk=32"])
    assert (made.config.scheduler.chunk, made.config.scheduler.max_running) == (32, 3)


def test_origins_are_origins() -> None:
    assert load("server: {cors_origins: ['*', 'http://localhost:3000']}\n")
    assert errors("server: {cors_origins: ['https://a.example/']}\n") == [
        "a.yaml:1:24: server.cors_origins: 'https://a.example/' is not an origin such as "
        "https://chat.example.com, or '*'"
    ]


def test_bytes_of_no_store_do_nothing() -> None:
    assert errors("server: {store_responses: 0, store_bytes: 1MB}\n") == [
        "a.yaml:1:43: server.store_bytes: does nothing while server.store_responses is 0"
    ]


# Paths


def test_paths_are_relative_to_what_names_them(tmp_path: Path) -> None:
    for folder in ("sub/model", "sub/lora", "here"):
        Path(folder).mkdir(parents=True)
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


# Contradictions


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "media: {allow_hosts: [a.example]}",
            "1:22: media.allow_hosts: does nothing while media.allow_urls is false",
        ),
        (
            "scheduler: {prefill_budget_busy: 8192}",
            "1:34: scheduler.prefill_budget_busy: prefill_budget_busy 8192 is more",
        ),
        ("scheduler: {chunk: 8192}", "1:20: scheduler.chunk: chunk 8192 is more than prefill_budget 4096"),
        ("model: {revision: main}", "1:19: model.revision: does nothing: model.path 'embedded' is no hub id"),
        ("model: {path: ., revision: main}", "1:28: model.revision: does nothing: model.path"),
        (
            "model: {trust_remote_code: true}",
            "1:28: model.trust_remote_code: does nothing: the embedded model",
        ),
        (
            "cache: {disk_path: x}",
            "1:20: cache.disk_path: does nothing while cache.backend is memory; set cache.backend: disk",
        ),
        (
            "engine: {reproducible: true}\ncache: {stored_bits: 8}",
            "2:22: cache.stored_bits: what is stored is not exact",
        ),
        ("model: {path: ./nope}", "1:15: model.path: "),
        ("model: {path: a b}", "1:15: model.path: 'a b' is neither 'embedded' nor a folder nor a hub id"),
        ("model: {path: a/b/c}", "1:15: model.path: 'a/b/c' is neither"),
        ("model: {adapter: nope}", "1:18: model.adapter: "),
        ("model: {chat_template: nope}", "1:24: model.chat_template: "),
        (
            "model: {context_length: 64}\nsampling: {max_tokens: 64}",
            "2:24: sampling.max_tokens: sampling.max_tokens 64 leaves",
        ),
    ],
)
def test_contradictions(text: str, said: str) -> None:
    (line,) = errors(text)
    assert line.startswith(f"a.yaml:{said}")


def test_a_value_that_follows_from_others_contradicts_none() -> None:
    """A chunk that nobody set gives way to the budget."""
    assert load("scheduler: {prefill_budget: 256}\n").config.scheduler.chunk is None


def test_no_contradiction_is_made_of_a_wrong_value() -> None:
    assert errors("scheduler: {chunk: 4096, prefill_budget: lots}\n") == [
        "a.yaml:1:42: scheduler.prefill_budget: 'lots' is not an integer"
    ]


def test_defaults_do_not_contradict_each_other() -> None:
    assert [check.run(Config()) for check in CHECKS] == [None] * len(CHECKS)
    assert all(key in fields_of() for check in CHECKS for key in check.keys)


# The digest


def test_the_digest_is_of_what_is_in_force() -> None:
    plain = load("").digest
    assert load("scheduler: {policy: fcfs}\n").digest == plain
    assert load("scheduler: {policy: fair}\n").digest != plain
    assert load("media: {max_bytes: 20MB}\n").digest == load("media: {max_bytes: 20000000}\n").digest
    assert len(plain) == 64


# What is made from settings.py


def test_every_field_has_a_description() -> None:
    assert [path for path, info in fields_of().items() if not info.doc] == []
    assert [name for name, section in sections_of().items() if not section.doc] == []


def test_the_schema_is_a_schema_and_takes_the_defaults() -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of())
    plain = to_plain(Config())
    jsonschema.validate(plain, schema_of())
    assert build(Config, plain) == Config()


@pytest.mark.parametrize("path", list(generated()), ids=lambda path: path.name)
def test_generated_files_are_fresh(path: Path) -> None:
    """`make generate` writes them."""
    assert path.read_text(encoding="utf-8") == generated()[path]


def test_the_default_file_lists_every_key_with_its_default() -> None:
    loaded = load_config(CONFIGS / "default.yaml")
    assert loaded.config == Config()
    assert [key for key, origin in loaded.origins.items() if origin.kind == "default"] == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    """issue 2: configs/ with the modeline for editors."""
    loaded = load_config(path, environ={"MLXRUN_KEY_TEAM": "one", "MLXRUN_KEY_CI": "two"})
    first = path.read_text().splitlines()[0]
    schema = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(schema.read_text()) == schema_of()
    assert loaded.config.version == 1


def test_there_are_five_shipped_configs() -> None:
    assert {path.name for path in CONFIGS.glob("*.yaml")} == {
        "default.yaml",
        "prod.yaml",
        "qwen3-8b.yaml",
        "vision.yaml",
        "batch.yaml",
    }


# Options and the code that reads them


def options_read(tree: ast.AST) -> set[str]:
    """The `section.key`s that a module reads: `config.log.level`, or `settings.level` beside LogSettings."""
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    here = {
        section.name
        for section in sections_of().values()
        if section.cls.__name__ in names or section.name in {read.attr for read in reads}
    }
    found = set()
    for read in reads:
        holder = ast.unparse(read.value).rpartition(".")[2].lstrip("_")
        found |= {f"{section}.{read.attr}" for section in (here if holder == "settings" else {holder})}
    return found


def test_every_declared_option_is_read() -> None:
    """A66: an option that no code reads would be a lie. (`version` is for the loader.)"""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("config", "embedded"):
            found |= options_read(ast.parse(path.read_text(encoding="utf-8")))
    declared = {path for path, info in fields_of().items() if info.section}
    assert declared - found == set()


def test_what_counts_as_reading_an_option() -> None:
    code = "def f(settings: MediaSettings, config): settings.timeout + config.log.level + other.max_bytes"
    assert options_read(ast.parse(code)) & set(fields_of()) == {"media.timeout", "log.level"}


def test_every_option_that_is_read_is_declared() -> None:
    """A66: mypy checks this; here, that settings are classes that mypy can check."""
    for section in sections_of().values():
        assert dataclasses.is_dataclass(section.cls)
        assert section.cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_sampling_defaults_and_model_kind_are_options() -> None:
    """A67: defaults of the sampler and the kind of the model come from YAML."""
    config = load("sampling: {temperature: 0.2, top_p: 0.5}\nmodel: {kind: text, path: a/b}\n").config
    assert (config.sampling.temperature, config.sampling.top_p, config.model.kind) == (0.2, 0.5, "text")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("").config.log.level = "debug"  # type: ignore[misc]
