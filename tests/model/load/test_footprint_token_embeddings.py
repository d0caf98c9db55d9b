"""Tokens without an embedding are refused: MLX would read beyond the end of the table."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import mlx.nn as nn
import pytest

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Request, SamplingParams
from mlxrun.engine.build import build_engine
from mlxrun.model.load.footprint import count_token_embeddings
from tests.helpers.pooling_models import VOCAB, build_pooling_model
from tests.helpers.runner_driver import load_tiny_caller
from tests.helpers.text_models import build


def test_rows_are_counted_of_plain_and_of_quantized_tables(tmp_path: Path) -> None:
    model = load_tiny_caller(build("llama", tmp_path / "model")).model
    count = count_token_embeddings(model)
    assert count == model.model.embed_tokens.weight.shape[0]
    nn.quantize(model, group_size=32, bits=4)
    assert count_token_embeddings(model) == count
    assert count_token_embeddings(model, count + 8) == count + 8, "the logits are padded"
    assert count_token_embeddings(nn.Linear(4, 4), 100) == 0, "not known"


def add_token(folder: Path) -> Path:
    """Add a special token to the tokenizer alone, as many checkpoints have it."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "[ADDED]"}))
    return folder


@pytest.mark.parametrize("kind", ["chat", "encoder"])
def test_a_token_that_only_the_tokenizer_has_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder, pooled = tmp_path / "model", kind == "encoder"
    build_pooling_model("bert", folder) if pooled else build("llama", folder)
    with caplog.at_level(logging.WARNING):
        engine = build_engine(Config(model=ModelSettings(path=str(add_token(folder)))))
    assert "prompts with others are refused" in caplog.text
    tokenizer = engine.model_info.tokenizer
    (added,) = tokenizer.convert_tokens_to_ids(["[ADDED]"])
    assert added == len(tokenizer) - 1 >= len(VOCAB) * pooled
    params = SamplingParams(max_tokens=0 if pooled else 1)
    with pytest.raises(
        RequestError, match=f"token 1 of the prompt is {added}, and the model has embeddings of"
    ):
        engine.add(Request("a", (3, added, 5), params, pooled=pooled))
    engine.add(Request("a", (3, added - 1, 5), params, pooled=pooled))
    if not pooled:  # the place of an image gets its embedding from the image
        engine._check_tokens(Request("b", (3, added, 5), params, image_spans=((1, 2),)))
