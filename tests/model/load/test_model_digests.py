"""The digests that name a model's files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.model.load import model_digests
from mlxrun.model.load.model_digests import compute_digests
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.load.model_info import load_model_info


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(EMBEDDED, made)
    return made


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
    before = compute_digests(folder, None, "template")
    with (folder / name).open("ab") as file:
        file.write(b" ")
    after = compute_digests(folder, None, "template")
    assert {key for key in before if before[key] != after[key]} == changed


def test_files_of_sentence_transformers_count(folder: Path) -> None:
    """Of rerankers too, which have no modules.json."""
    name = "config_sentence_transformers.json"
    found = [compute_digests(folder, None, "template")["model"]]
    for activation in ("Sigmoid", "Identity"):
        (folder / name).write_text(f'{{"activation_fn": "torch.nn.modules.activation.{activation}"}}')
        found.append(compute_digests(folder, None, "template")["model"])
    assert len(set(found)) == 3


def test_adapters_templates_and_code_count(folder: Path, tmp_path: Path) -> None:
    plain = compute_digests(folder, None, "template")
    assert compute_digests(folder, None, "other")["template"] != plain["template"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"x")
    assert compute_digests(folder, adapter, "template")["model"] != plain["model"]
    (folder / "modeling.py").write_text("x = 1")
    assert compute_digests(folder, None, "template") == plain, "code that may not run is no part of the model"
    assert compute_digests(folder, None, "template", code=True)["model"] != plain["model"]


def test_large_files_are_sampled_at_both_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digests, "_FULL_HASH_BYTES", 1 << 20)
    path = folder / "model.safetensors"
    before = compute_digests(folder, None, None)["model"]
    data = bytearray(path.read_bytes())
    for index in (0, len(data) // 2, len(data) - 1):
        data[index] ^= 1
        path.write_bytes(data)
        assert compute_digests(folder, None, None)["model"] != before, index
        data[index] ^= 1


@pytest.mark.parametrize("at_once", [True, False])
def test_files_are_read_once_when_a_model_is_loaded_or_when_somebody_asks(
    folder: Path, at_once: bool
) -> None:
    found = [compute_digests(folder, None, None)["model"]]
    info = load_model_info(ModelSettings(path=str(folder)), digest=at_once)
    for _ in range(2):
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b" ")
        found.append(compute_digests(folder, None, None)["model"])
        assert info.digests["model"] == found[0 if at_once else 1]
