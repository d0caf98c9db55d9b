"""The served model as Ollama's lists describe it."""

from __future__ import annotations

import re

import pytest

from mlxrun.api.ollama.models import (
    describe_model,
    format_count,
    list_capabilities,
    list_loaded,
    list_tags,
)
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.raw_prompts import FORMATS
from mlxrun.config.settings import Config
from mlxrun.core.model_summary import ModelSummary
from mlxrun.core.request import LoraAdapter, PooledModel
from tests.helpers.infill_models import make_infill_model
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo

SUMMARY = ModelSummary(
    format="safetensors",
    family="qwen3",
    quantization="4bit",
    weight_bytes=4_600_000_000,
    num_parameters=8_190_735_360,
    modified=1_700_000_000.5,
    sizes={"hidden_size": 4096, "num_hidden_layers": 36},
)
MODEL = FakeModelInfo(name="org/qwen3", adapters=(LoraAdapter("sql", "0"),), summary=SUMMARY)


def make_context(model_info: FakeModelInfo, reasoning: str = "none") -> ApiContext:
    config = Config()
    formats = choose_formats(None, [], "none", reasoning)
    return ApiContext(model_info, config, MediaLoader(config.media, None), formats)


def test_names_have_a_tag() -> None:
    """An adapter's name has one already."""
    first, second = list_tags(MODEL)["models"]
    assert first["name"] == first["model"] == "org/qwen3:latest" and second["name"] == "org/qwen3:sql"
    assert first["size"] == SUMMARY.weight_bytes and first["digest"] == DIGESTS["model"]
    assert first["modified_at"] == "2023-11-14T22:13:20.500000Z"
    assert first["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": "8.2B",
        "quantization_level": "4bit",
        "context_length": 4096,
    }


def test_the_loaded_model_never_expires() -> None:
    (loaded,) = list_loaded(MODEL)["models"]
    assert loaded["name"] == "org/qwen3:latest" and loaded["size_vram"] == loaded["size"]
    assert loaded["expires_at"].startswith("9999") and loaded["context_length"] == 4096
    assert list_loaded(None) == {"models": []}


def test_what_clients_read_of_a_model() -> None:
    """Editors look for the context behind the architecture's name, or in `parameters`."""
    tuned = FakeModelInfo(summary=SUMMARY, defaults={"temperature": 0.6, "repetition_penalty": 1.05})
    found = describe_model(make_context(tuned))
    assert found["model_info"] == {
        "general.architecture": "qwen3",
        "general.parameter_count": 8_190_735_360,
        "qwen3.context_length": 4096,
        "qwen3.embedding_length": 4096,
        "qwen3.block_count": 36,
    }
    lines = [re.split(" +", line) for line in found["parameters"].splitlines()]
    assert lines == [["num_ctx", "4096"], ["temperature", "0.6"], ["repeat_penalty", "1.05"]]
    assert found["template"] == tuned.chat_template and found["modelfile"].startswith("FROM fake\n")


@pytest.mark.parametrize(
    ("model", "reasoning", "expected"),
    [
        (FakeModelInfo(), "none", ["completion", "tools"]),
        (FakeModelInfo(vision=True), "think", ["completion", "tools", "vision", "thinking"]),
        (FakeModelInfo(chat_template=None), "think", ["completion"]),
        (FakeModelInfo(pooled=PooledModel("embed", 4, 16)), "none", ["embedding"]),
        (FakeModelInfo(pooled=PooledModel("score", 1, 16)), "none", []),
        (make_infill_model(FORMATS["codellama"]), "none", ["completion", "tools", "insert"]),
    ],
)
def test_capabilities(model: FakeModelInfo, reasoning: str, expected: list[str]) -> None:
    assert list_capabilities(make_context(model, reasoning)) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (12_345, "12K"), (494_032_768, "494.03M"), (10**12, "1.0T")],
)
def test_counts_are_short(count: int, text: str) -> None:
    assert format_count(count) == text
