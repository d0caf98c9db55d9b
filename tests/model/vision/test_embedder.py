"""Embedding prompts with and without the vision tower."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.vision.embedder import _UNSUPPORTED, Embedder
from tests.helpers import vision_models
from tests.helpers.model_fixtures import Zoo


def load(zoo: Zoo, family: str) -> tuple[Any, Any]:
    """The model and what its processor makes of two images among text."""
    from mlx_vlm import load

    folder = str(zoo.vision(family))
    info = load_model_info(ModelSettings(path=folder))
    text = vision_models.prompt(family, "look ", None, " and ", None, " now")
    return load(folder)[0], info.process(text, vision_models.images(3, 2))


@pytest.mark.parametrize("family", vision_models.VISION)
def test_text_is_embedded_as_it_is_among_images(zoo: Zoo, family: str) -> None:
    """Without the tower only the rows of image tokens differ, and all positions are the same."""
    model, made = load(zoo, family)
    embedder = Embedder(model)
    assert embedder.mrope == (family in vision_models.MROPE)
    whole = embedder.embed_prompt(made.ids, made.media)
    text = embedder.embed_text(made.ids, made.media)
    is_image = np.array(made.ids) == embedder.tokens.image
    assert is_image.sum() == sum(end - start for start, end in made.image_spans) > 0
    rows = [np.array(inputs.embeds[0].astype(mx.float32)) for inputs in (whole, text)]
    assert np.array_equal(rows[0][~is_image], rows[1][~is_image])
    assert not np.array_equal(rows[0][is_image], rows[1][is_image])
    assert whole.position_delta == text.position_delta
    assert (whole.positions is None) == (text.positions is None) == (not embedder.mrope)
    if whole.positions is not None:
        assert whole.positions.shape == (3, 1, len(made.ids))
        assert mx.array_equal(whole.positions, text.positions).item()
    if whole.deepstack:
        assert np.array_equal(whole.visual_mask, is_image) and text.deepstack == ()


@pytest.mark.parametrize("name", _UNSUPPORTED)
def test_a_model_that_needs_more_is_refused(zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = load(zoo, "gemma3")
    embedder = Embedder(model)
    embed = type(model).get_input_embeddings

    def with_more(self: Any, *args: Any, **options: Any) -> Any:
        found = embed(self, *args, **options)
        fields = {field: getattr(found, field) for field in found.__dataclass_fields__}
        return SimpleNamespace(**fields | {name: mx.zeros(1)})

    monkeypatch.setattr(type(model), "get_input_embeddings", with_more)
    with pytest.raises(RequestError, match=f"^images are refused for this model: {name} are not supported"):
        embedder.embed_prompt(made.ids, made.media)


def test_embeddings_of_more_tokens_than_the_prompt_has_are_refused(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of models that put many embeddings in the place of one token: positions would be others."""
    model, made = load(zoo, "gemma3")
    embedder = Embedder(model)
    embed = type(model).get_input_embeddings

    def with_more(self: Any, ids: mx.array, *args: Any, **options: Any) -> Any:
        found = embed(self, ids, *args, **options)
        found.inputs_embeds = mx.concatenate([found.inputs_embeds, found.inputs_embeds[:, :2]], axis=1)
        return found

    monkeypatch.setattr(type(model), "get_input_embeddings", with_more)
    count = len(made.ids)
    with pytest.raises(RequestError, match=f"mlx-vlm makes {count + 2} embeddings of the {count} tokens"):
        embedder.embed_prompt(made.ids, made.media)


def test_cross_attention_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load(zoo, "gemma3")
    monkeypatch.setattr(model.config.text_config, "cross_attention_layers", [1], raising=False)
    with pytest.raises(ModelLoadError, match="cross attention"):
        Embedder(model)


def test_images_without_a_grid_have_the_positions_of_text(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A language model may have `get_rope_index`, and not what it reads for images."""
    model, made = load(zoo, "qwen3_vl")
    ids = mx.array([made.ids])
    embedder = Embedder(model)
    expected = model.language_model.get_rope_index(mx.array([[5, 6, 7]]), None, None, mx.ones((1, 3)))[0]
    assert (embedder._compute_positions(mx.array([[5, 6, 7]]), {})[0] == expected).all().item()
    monkeypatch.delattr(type(model.language_model), "get_rope_index")
    assert embedder._compute_positions(ids, {})[0].shape == ids.shape


SHOWN = np.array([False, True, True, False, False, True])
ROWS = mx.arange(2.0 * 3 * 4).reshape(2, 3, 4)  # of two layers and three visual tokens
DENSE = mx.zeros((2, 6, 4))
DENSE[:, mx.array([1, 2, 5])] = ROWS


@pytest.mark.parametrize(
    ("form", "given"),
    [
        ("rows", list(ROWS)),
        ("rows", ROWS),
        ("rows", SimpleNamespace(embeddings=list(ROWS))),
        ("chunk", DENSE.swapaxes(0, 1)[None]),
        ("prompt", DENSE),
    ],
)
def test_deepstack_features_go_back_in_the_form_in_which_they_came(form: str, given: Any) -> None:
    """Of the visual tokens alone, of all tokens of a chunk, or of the whole prompt."""
    embedder = object.__new__(Embedder)
    embedder.deepstack_form = "rows"
    parts = embedder.read_deepstack(given, SHOWN)
    assert embedder.deepstack_form == form
    assert mx.array_equal(mx.stack(list(parts)), ROWS).item()
    chunk = parts if form == "prompt" else [part[1:3] for part in parts]
    made = embedder.shape_deepstack(chunk, SHOWN, 2, 6)
    features, mask = made["deepstack_visual_embeds"], np.array(made["visual_pos_masks"])[0]
    expected = {"rows": ROWS[:, 1:3], "chunk": DENSE[:, 2:6].swapaxes(0, 1)[None], "prompt": DENSE}[form]
    found = mx.stack(features) if isinstance(features, list) else features
    assert mx.array_equal(found, expected).item()
    assert mask.tolist() == (SHOWN if form == "prompt" else SHOWN[2:6]).tolist()


def test_features_of_a_text_are_none() -> None:
    embedder = object.__new__(Embedder)
    embedder.deepstack_form = "rows"
    assert embedder.read_deepstack(None, None) == ()
    assert embedder.read_deepstack(mx.zeros((1, 4, 2, 8)), None) == ()
