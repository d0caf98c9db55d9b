"""What `mlxrun show` says of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.model.load.model_files import EMBEDDED
from tests.helpers.pooling_models import build_pooling_model
from tests.helpers.whisper_models import write_whisper


def test_all_bits_of_a_model_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in EMBEDDED.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((EMBEDDED / "config.json").read_text())
    packed = {"group_size": 32, "bits": 4, "lm_head": {"group_size": 32, "bits": 8}, "model.norm": False}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": packed}))
    assert main(["show", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == "4 and 8 bits, groups of 32"


def test_what_models_give_besides_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = (
        build_pooling_model("bert-reranker", tmp_path / "ranks"),
        build_pooling_model("qwen3", tmp_path / "embeds"),
        write_whisper(tmp_path / "hears"),
    )
    found = []
    for folder in folders:
        assert main(["show", str(folder), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert "chat template" not in facts
        found.append((facts["architecture"], facts["result"]))
    assert found == [
        ("bert, text, scores of documents", "docs/embeddings.md says what it is compared with"),
        ("qwen3, text, embeddings", "exact"),
        ("whisper, sound to text", "docs/transcription.md says what it is compared with"),
    ]
