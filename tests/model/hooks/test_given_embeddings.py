"""A language model beside a vision tower takes the embeddings that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.tiny.random_models import write_vision_model
from mlxrun.model.hooks.given_embeddings import hook_embeddings


def test_embeddings_take_the_place_of_tokens(tmp_path: Path) -> None:
    """Those of other tokens give the answer to these; token ids alone give the library's."""
    from mlx_vlm.utils import load_model

    write_vision_model("mistral_large3", tmp_path / "model")
    model: Any = load_model(tmp_path / "model")
    language, ids, others = model.language_model, mx.array([[65, 66, 67]]), mx.array([[70, 71, 72]])
    expected = [language(tokens).logits for tokens in (ids, others)]
    embeds = language.model.embed_tokens(others)
    assert mx.array_equal(language(ids, inputs_embeds=embeds).logits, expected[0]).item()  # the fault
    assert hook_embeddings(model) == 1 and hook_embeddings(language) == 0
    assert mx.array_equal(language(ids, inputs_embeds=embeds).logits, expected[1]).item()
    assert mx.array_equal(language(ids).logits, expected[0]).item()
