"""The digests that name a model's files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load import model_digests
from mlxrun.model.load.model_digests import LateDigests, compute_digests, make_digests
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.load.model_info import load_model_info


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(EMBEDDED, made)
    return made


def update_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("config.json", {"model"}),
        ("model.safetensors", {"model"}),
        ("tokenizer.json", {"tokenizer"}),
        ("README.md", set()),
    ],
)
def test_each_digest_names_its_files(folder: Path, name: str, changed: set[str]) -> None:
    before = compute_digests(folder, None)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    after = compute_digests(folder, None)
    assert {key for key in before if before[key] != after[key]} == changed


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "special_tokens_map.json"])
def test_what_a_tokenizer_is_made_of_counts_where_there_is_no_tokenizer_json(folder: Path, name: str) -> None:
    """Beside a tokenizer.json, these are from the time before it, and nothing reads them."""
    update_json(folder / "tokenizer_config.json", added_tokens_decoder={})
    plain = compute_digests(folder, None)
    (folder / name).write_text("a")
    assert compute_digests(folder, None) == plain
    (folder / "tokenizer.json").unlink()
    found = [compute_digests(folder, None)["tokenizer"]]
    (folder / name).write_text("b")
    assert compute_digests(folder, None)["tokenizer"] not in (*found, plain["tokenizer"])


@pytest.mark.parametrize(
    ("name", "content"),
    [("special_tokens_map.json", '{"bos_token": "a"}'), ("added_tokens.json", '{"zzz": 999}')],
)
def test_files_count_from_which_transformers_takes_tokens(folder: Path, name: str, content: str) -> None:
    """It reads them beside a tokenizer.json too, unless its config has the tokens itself."""

    def look() -> tuple[str, str | None, int]:
        tokenizer = load_model_info(ModelSettings(path=str(folder))).tokenizer
        return compute_digests(folder, None)["tokenizer"], tokenizer.bos_token, len(tokenizer)

    before = look()
    (folder / name).write_text(content)
    after = look()
    assert after[0] != before[0] and after[1:] != before[1:]
    update_json(folder / "tokenizer_config.json", added_tokens_decoder={})
    found = [look()]
    (folder / name).unlink()
    assert [look()] == found


def test_files_of_sentence_transformers_count(folder: Path) -> None:
    """Of rerankers too, which have no modules.json."""
    name = "config_sentence_transformers.json"
    found = [compute_digests(folder, None)["model"]]
    for activation in ("Sigmoid", "Identity"):
        (folder / name).write_text(f'{{"activation_fn": "torch.nn.modules.activation.{activation}"}}')
        found.append(compute_digests(folder, None)["model"])
    assert len(set(found)) == 3


def test_the_heads_count_by_which_whisper_times_words(folder: Path) -> None:
    """Other models' sampling values are read for each run, and are no part of the model."""

    def look(heads: list[list[int]]) -> str:
        (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": heads}))
        return compute_digests(folder, None)["model"]

    assert look([[0, 1]]) == look([[1, 0]])
    update_json(folder / "config.json", model_type="whisper")
    assert look([[0, 1]]) == look([[0, 1]]) != look([[1, 0]])


def test_adapters_and_code_count(folder: Path, tmp_path: Path) -> None:
    plain = compute_digests(folder, None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"x")
    assert compute_digests(folder, adapter)["model"] != plain["model"]
    (folder / "modeling.py").write_text("x = 1")
    assert compute_digests(folder, None) == plain, "code that may not run is no part of the model"
    assert compute_digests(folder, None, code=True)["model"] != plain["model"]


def test_large_files_are_sampled_at_both_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digests, "_FULL_HASH_BYTES", 1 << 20)
    path = folder / "model.safetensors"
    before = compute_digests(folder, None)["model"]
    data = bytearray(path.read_bytes())
    for index in (0, len(data) // 2, len(data) - 1):
        data[index] ^= 1
        path.write_bytes(data)
        assert compute_digests(folder, None)["model"] != before, index
        data[index] ^= 1


@pytest.mark.parametrize("at_once", [True, False])
def test_files_are_read_once_when_a_model_is_loaded_or_when_somebody_asks(
    folder: Path, at_once: bool
) -> None:
    found = [compute_digests(folder, None)["model"]]
    info = load_model_info(ModelSettings(path=str(folder)), digest=at_once)
    for _ in range(2):
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b" ")
        found.append(compute_digests(folder, None)["model"])
        assert info.digests["model"] == found[0 if at_once else 1]


def test_files_are_read_on_a_thread_and_their_errors_come_to_who_asks(folder: Path) -> None:
    digests = make_digests(ModelSettings(path=str(folder)), folder, None, weights=True)
    digests.add_template("a")
    assert digests["template"] == hashlib.sha256(b"a").hexdigest() != digests["model"]
    digests.begin("model")
    assert {name: digests[name] for name in ("model", "tokenizer")} == compute_digests(folder, None)
    broken = LateDigests({"model": Mock(side_effect=ModelLoadError("it cannot be read"))})
    broken.begin("model")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="it cannot be read"):
            broken["model"]
