"""Settings that contradict each other or would have no effect (config/contradictions.py)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mlxrun.config.contradictions import RULES
from mlxrun.config.setting_fields import list_fields
from mlxrun.config.settings import Config
from tests.helpers.config_files import load, load_errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{alice: '${EMPTY}'}", "a.yaml:1:28: server.api_keys.alice: it is an empty string"),
        ("{alice: '${A}', bob: '${A}'}", "a.yaml:1:20: server.api_keys: two names have the same key"),
        (
            "{'a b': '${A}'}",
            "a.yaml:1:20: server.api_keys: 'a b' is not a name of letters, digits, '.', '_' and '-'",
        ),
        (
            "{alice: ' ${A}'}",
            "a.yaml:1:20: server.api_keys: the key of alice begins or ends with white space, "
            "which no client sends",
        ),
        ("['${A}']", "a.yaml:1:20: server.api_keys: *** is not a mapping"),
        ("{alice: [1]}", "a.yaml:1:28: server.api_keys.alice: *** is not a string or a mapping"),
        ("{alice: {key: [1]}}", "a.yaml:1:34: server.api_keys.alice.key: *** is not a string"),
        ("{alice: {role: admin}}", "a.yaml:1:20: server.api_keys: alice has no key"),
        (
            "{alice: {key: '${A}', role: amin}}",
            "a.yaml:1:48: server.api_keys.alice.role: 'amin' is not one of 'inference', 'metrics', 'admin', "
            "null (did you mean 'admin'?)",
        ),
        (
            "{alice: {key: '${A}', rule: admin}}",
            "a.yaml:1:42: server.api_keys.alice.rule: unknown key (did you mean 'role'?)",
        ),
        (
            "{alice: {key: hunter2}}",
            "a.yaml:1:34: server.api_keys.alice.key: this is a secret; "
            "write ${NAME} here and set the environment variable NAME, or write ${file:/PATH}",
        ),
    ],
)
def test_wrong_api_keys(text: str, said: str) -> None:
    assert load_errors(f"server: {{api_keys: {text}}}\n", A="hunter2", EMPTY="") == [said]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.example"])
def test_a_public_address_needs_keys_or_a_word(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: [])  # box.example exists
    (said,) = load_errors(f"server: {{host: '{host}'}}\n")
    assert said.startswith(f"a.yaml:1:16: server.host: {host} can be reached from other machines")
    assert load(f"server: {{host: '{host}', allow_public: true}}\n").config.server.host == host
    assert load(f"server: {{host: '{host}', api_keys: {{a: '${{A}}'}}}}\n", A="x").config.server.host == host


@pytest.mark.parametrize("host", ["a..b", "a" * 300])
def test_a_name_that_no_host_has(host: str) -> None:
    """Nobody reaches it, so keys are no remedy."""
    (said,) = load_errors(f"server: {{host: {host}}}\n")
    assert said == f"a.yaml:1:16: server.host: the host name {host!r} does not exist"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (socket.EAI_NONAME, "the host name 'box.example' does not exist"),
        (socket.EAI_AGAIN, "box.example can be reached from other machines: set server.api_keys or "),
    ],
    ids=["no host", "no resolver"],
)
def test_what_the_resolver_says_of_a_host(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its word is taken; a host may exist while no resolver answers."""

    def fail(*args: object) -> None:
        raise socket.gaierror(code, "why")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    (found,) = load_errors("server: {host: box.example}\n")
    assert found.startswith(f"a.yaml:1:16: server.host: {said}")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_no_keys(host: str) -> None:
    assert load(f"server: {{host: '{host}'}}\n").config.server.host == host


def test_hosts_are_hosts() -> None:
    """The check of a file finds the hosts that the server would refuse at its start."""
    assert load("server: {allowed_hosts: ['*', AI.example.com, '[::1]', 10.0.0.7, localhost.]}\n")
    for name in ("http://a.example", "a.example:443", "*.example", "a b"):
        (said,) = load_errors(f"server: {{allowed_hosts: [ok.example, '{name}']}}\n")
        assert said.startswith(f"a.yaml:1:25: server.allowed_hosts: {name!r} is neither a name"), said


def test_a_certificate_has_a_key() -> None:
    """Their paths are relative to the config."""
    found = load("server: {tls: {certificate: a.pem, key: ../b.key}}\n").config.server.tls
    assert found == {"certificate": os.path.abspath("a.pem"), "key": os.path.abspath("../b.key")}
    for text, said in (
        ("{certificate: a.pem}", "key is missing: write {certificate: FILE, key: FILE}"),
        ("{key: a.pem}", "certificate is missing: write {certificate: FILE, key: FILE}"),
        (
            "{certificate: a, key: b, cert: c}",
            "unknown key 'cert'; write {certificate: FILE, key: FILE}",
        ),
        (
            "{certificat: a, key: b}",
            "unknown key 'certificat' (did you mean 'certificate'?); write {certificate: FILE, key: FILE}",
        ),
    ):
        assert load_errors(f"server: {{tls: {text}}}\n") == [f"a.yaml:1:15: server.tls: {said}"]


def test_traces_are_sent_to_a_url() -> None:
    assert load("telemetry: {otlp: 'https://traces.example.com/otlp'}\n")
    for url in ("127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://a b"):
        assert load_errors(f"telemetry: {{otlp: '{url}'}}\n") == [
            f"a.yaml:1:19: telemetry.otlp: {url!r} is not a URL such as http://127.0.0.1:4318"
        ]


def test_origins_are_origins() -> None:
    assert load("server: {cors_origins: ['*', 'http://localhost:3000']}\n")
    assert load_errors("server: {cors_origins: ['https://a.example/']}\n") == [
        "a.yaml:1:24: server.cors_origins: 'https://a.example/' is not an origin such as "
        "https://chat.example.com, or '*'"
    ]


def test_bytes_of_no_store_do_nothing() -> None:
    assert load_errors("server: {store_responses: 0, store_bytes: 1MB}\n") == [
        "a.yaml:1:43: server.store_bytes: has no effect while server.store_responses is 0"
    ]


def test_what_is_switched_off_may_be_off_twice() -> None:
    """A folder of one thing is used, and 0 days are none in any case."""
    assert load("apis: {batches: false}\nserver: {data_path: x}\n")
    assert load("apis: {responses: false}\nserver: {store_days: 0, store_responses: 0}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "media: {allow_hosts: [a.example]}",
            "1:22: media.allow_hosts: has no effect while media.allow_urls is false",
        ),
        (
            "cache: {memory_bytes: 3GB}\nscheduler: {memory_limit: 2GB}",
            "1:23: cache.memory_bytes: 3000000000 bytes for the prefix cache leave nothing of ",
        ),
        (
            "media: {memory_bytes: 2GB}\nscheduler: {memory_limit: 2GB}",
            "1:23: media.memory_bytes: 2000000000 bytes for images leave nothing of scheduler.memory_limit",
        ),
        (
            "cache: {image_bytes: 2GB}\nscheduler: {memory_limit: 2GB}",
            "1:22: cache.image_bytes: 2000000000 bytes for image features leave nothing of scheduler.memory_",
        ),
        (
            "media: {memory_bytes: 1GB}\ncache: {image_bytes: 1GB}\nscheduler: {memory_limit: 2GB}",
            "1:23: media.memory_bytes: 1000000000 bytes for images and 1000000000 for their features leave ",
        ),
        (
            "scheduler: {prefill_budget_busy: 8192}",
            "1:34: scheduler.prefill_budget_busy: prefill_budget_busy 8192 is more",
        ),
        ("scheduler: {chunk: 8192}", "1:20: scheduler.chunk: chunk 8192 is more than prefill_budget 4096"),
        (
            "model: {revision: main}",
            "1:19: model.revision: has no effect: model.path 'embedded' is not a hub id",
        ),
        ("model: {path: ., revision: main}", "1:28: model.revision: has no effect: model.path"),
        (
            "model: {trust_remote_code: true}",
            "1:28: model.trust_remote_code: has no effect: the embedded model",
        ),
        (
            "cache: {disk_path: x}",
            "1:20: cache.disk_path: has no effect while cache.backend is memory; set cache.backend: disk",
        ),
        (
            "cache: {disk_bytes: 1GB}",
            "1:21: cache.disk_bytes: has no effect while cache.backend is memory; set cache.backend: disk",
        ),
        (
            "cache: {backend: none, disk_bytes: 1GB}",
            "1:36: cache.disk_bytes: has no effect while cache.backend is none; set cache.backend: disk",
        ),
        (
            "apis: {batches: false, responses: false}\nserver: {data_path: x}",
            "2:21: server.data_path: has no effect while apis.batches is false and responses are not stored",
        ),
        (
            "apis: {batches: false}\nserver: {data_path: x, store_days: 0}",
            "2:21: server.data_path: has no effect while apis.batches is false and responses are not stored",
        ),
        (
            "apis: {responses: false}\nserver: {store_days: 5}",
            "2:22: server.store_days: has no effect while apis.responses is false",
        ),
        (
            "server: {store_responses: 0, store_days: 5}",
            "1:42: server.store_days: has no effect while server.store_responses is 0",
        ),
        (
            "apis: {batches: false}\nserver: {files_max_bytes: 1GB}",
            "2:27: server.files_max_bytes: has no effect while apis.batches is false",
        ),
        (
            "apis: {batches: false}\nbatch: {max_file_bytes: 1kB}",
            "2:25: batch.max_file_bytes: has no effect while apis.batches is false",
        ),
        (
            "apis: {responses: false}\nserver: {store_responses: 5}",
            "2:27: server.store_responses: has no effect while apis.responses is false",
        ),
        (
            "apis: {responses: false}\nserver: {store_bytes: 5}",
            "2:23: server.store_bytes: has no effect while apis.responses is false",
        ),
        (
            "engine: {reproducible: true}\ncache: {stored_bits: 8}",
            "2:22: cache.stored_bits: quantized entries are not exact",
        ),
        (
            "engine: {reproducible: true}\ncache: {kv_bits: 8}",
            "2:18: cache.kv_bits: quantized keys are not computed reproducibly",
        ),
        (
            "cache: {kv_start: 512}",
            "1:19: cache.kv_start: cache.kv_bits is null, so cache.kv_start has no effect",
        ),
        ("model: {path: ./nope}", "1:15: model.path: "),
        ("model: {path: a b}", "1:15: model.path: 'a b' is neither 'embedded' nor a folder nor a hub id"),
        ("model: {path: embeded}", "1:15: model.path: 'embeded' is neither 'embedded' nor a folder"),
        ("model: {path: a/b/c}", "1:15: model.path: 'a/b/c' is neither"),
        ("model: {path: tiny.gguf}", "1:15: model.path: "),
        ("model: {adapter: nope}", "1:18: model.adapter: "),
        ("model: {chat_template: nope}", "1:24: model.chat_template: "),
        (
            "model: {context_length: 64}\nsampling: {max_tokens: 64}",
            "2:24: sampling.max_tokens: sampling.max_tokens 64 leaves",
        ),
    ],
)
def test_contradictions(text: str, said: str) -> None:
    Path("config.json").write_text("{}")  # of a model in this folder
    (line,) = load_errors(text)
    assert line.startswith(f"a.yaml:{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{overrides: {1.sampling.seed: 3}}", "'1.sampling.seed': workers may not differ in sampling.seed"),
        ("{overrides: {1.engine.reproducible: true}}", "workers may not differ in engine.reproducible"),
        ("{overrides: {1.scheduler.rows: 3}}", "there is no setting scheduler.rows"),
        ("{overrides: {scheduler.max_running: 3}}", "is not a worker's number and a setting"),
        ("{count: 2, overrides: {2.scheduler.max_running: 3}}", "there is no worker 2; the last one"),
    ],
)
def test_overrides_of_workers(text: str, said: str) -> None:
    (error,) = load_errors(f"workers: {text}\n")
    assert said in error
    assert load("workers: {count: 3, overrides: {2.scheduler.max_running: 3}}\n")
    assert load("workers: {overrides: {2.scheduler.max_running: 3}}\n")


def test_a_folder_without_a_config_is_no_model() -> None:
    Path("empty").mkdir()
    (line,) = load_errors("model: {path: ./empty}")
    assert line.startswith("a.yaml:1:15: model.path: ")
    assert line.endswith("/empty has no config.json, so it is not the folder of a model")
    Path("empty/config.json").write_text("{}")
    assert load("model: {path: ./empty}").config.model.path.endswith("/empty")


def test_a_value_that_follows_from_others_contradicts_none() -> None:
    """A chunk that nobody set gives way to the budget."""
    assert load("scheduler: {prefill_budget: 256}\n").config.scheduler.chunk is None


def test_defaults_do_not_contradict_each_other() -> None:
    assert [rule(Config()) for _, rule in RULES] == [None] * len(RULES)
    assert all(key in list_fields() for keys, _ in RULES for key in keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{chat: nowhere}", "models.chat.path: 'nowhere' is neither 'embedded' nor a folder nor a hub id"),
        ("{chat: {names: [x]}}", "models.chat.path: it has no path"),
        ("{'a b': embedded}", "models.a b: the name 'a b' is not 1 to 64 letters"),
        ("{a: embedded, b: {path: embedded, names: [a]}}", "models.b.names: 'a' is a name of a too"),
        ("{a: {path: embedded, pined: true}}", "models.a.pined: unknown key (did you mean 'pinned'?)"),
        ("{a: {path: embedded, keep_alive: -1}}", "models.a.keep_alive: -1 is less than 0"),
        ("{a: {path: embedded, memory: much}}", "models.a.memory: 'much' is not a byte size such as 4GB"),
        (
            "{a: {path: embedded, settings: {server.port: 1}}}",
            "settings.server.port: is not a setting of one model",
        ),
        (
            "{a: {path: embedded, settings: {sampling.heat: 1}}}",
            "settings.sampling.heat: is not a setting of one",
        ),
        (
            "{a: {path: embedded, settings: {sampling.temprature: 1}}}",
            "is not a setting of one model (did you mean 'sampling.temperature'?)",
        ),
        ("{a: {path: embedded, settings: {model.names: 1}}}", "settings.model.names: belongs in `names`"),
        ("{'': embedded}", "models.: the name '' is not 1 to 64 letters"),
        ("[embedded]", 'models: ["embedded"] is not a mapping'),
        ("{}", "models: it names no model; name one, as in `chat: ORG/NAME`, or leave the key out"),
    ],
)
def test_several_models(text: str, said: str) -> None:
    (error,) = load_errors(f"models: {text}")
    assert said in error


def test_each_mistake_of_several_models_has_its_place() -> None:
    text = """models:
  chat: nowhere
  'a b': embedded
  coder:
    path: embedded
    names: [chat]
    memory: 2GB
    settings:
      server.port: 1
scheduler: {memory_limit: 1GB}
"""
    errors = load_errors(text)
    assert [error.split(": ")[0].rpartition("/")[2] for error in errors] == [
        *("a.yaml:2:9", "a.yaml:3:3", "a.yaml:6:12", "a.yaml:7:13", "a.yaml:9:20")
    ]


def test_one_model_or_several() -> None:
    (error,) = load_errors("models: {a: embedded}\nmodel: {path: ORG/NAME}")
    assert "not together with model.path: give each model its own" in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a: {path: embedded, memory: 2GB}}", "models.a.memory: its memory is 2GB, more than"),
        (
            "{a: {path: embedded, memory: 600MB, pinned: true}, b: {path: embedded, memory: 500MB}}",
            "models.b.memory: its memory with that of pinned models is 1100MB, more than",
        ),
    ],
)
def test_memory_of_several_models(text: str, said: str) -> None:
    (error,) = load_errors(f"models: {text}\nscheduler: {{memory_limit: 1GB}}")
    assert said in error
