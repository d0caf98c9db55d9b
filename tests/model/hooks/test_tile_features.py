"""Images in tiles: each token has the feature of its place, as transformers' models place them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from benchmarks.sweep.family import check_family
from benchmarks.tiny.random_models import read_vision_info, write_vision_model
from mlxrun.model.hooks import install
from mlxrun.model.hooks.tile_features import hook_tiles, pack_tiles

SIDE = 4  # features in a line of a tile
NEWLINE = -1.0
SIZES = [(64, 64), (100, 40), (40, 100), (9, 9), (31, 97), (200, 3), (33, 64), (50, 90)]  # height, width


def number_tiles(rows: int, columns: int) -> mx.array:
    """Features of one number each, all different."""
    count = 1 + rows * columns
    return mx.arange(count * SIDE * SIDE, dtype=mx.float32).reshape(count, SIDE * SIDE, 1)


def list_lines(rows: int, columns: int) -> np.ndarray:
    """The same numbers by their place in the large image, one after the other."""
    lines = np.zeros((rows * SIDE, columns * SIDE))
    for y, x in np.ndindex(*lines.shape):
        tile = 1 + y // SIDE * columns + x // SIDE
        lines[y, x] = tile * SIDE * SIDE + y % SIDE * SIDE + x % SIDE
    return lines


@pytest.mark.parametrize(
    ("grid", "size", "kept"),
    [
        ((2, 2), (64, 64), np.s_[:, :]),  # fills its tiles
        ((1, 2), (16, 64), np.s_[1:3, :]),  # 8 x 4 features; two lines of padding
        ((2, 1), (64, 16), np.s_[:, 1:3]),
        ((2, 2), (64, 48), np.s_[:, 1:7]),
    ],
)
def test_features_are_in_the_order_of_the_image(
    grid: tuple[int, int], size: tuple[int, int], kept: Any
) -> None:
    """The small image first; then lines across tiles, without padding, with a newline after each."""
    found = np.array(pack_tiles(number_tiles(*grid), grid, size, mx.array([NEWLINE])))[:, 0]
    small, large = found[: SIDE * SIDE], found[SIDE * SIDE :]
    assert small.tolist() == list(range(SIDE * SIDE))
    lines = list_lines(*grid)[kept]
    expected = np.concatenate([lines, np.full((len(lines), 1), NEWLINE)], axis=1)
    assert large.tolist() == expected.reshape(-1).tolist()


class Family:
    def __init__(self, family: str, folder: Path) -> None:
        from mlx_vlm.utils import load_model

        write_vision_model(family, folder)
        self.info = read_vision_info(family, folder)
        self.model: Any = load_model(folder)

    def embed(self, *sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens are of images, and the embeddings of all [L, D]."""
        images = [Image.new("RGB", (width, height), (width, height, 9)) for height, width in sizes]
        made = self.info.process(" and ".join(["<image>"] * len(sizes)) + ".", images)
        ids = mx.array([made.ids])
        given = {key: mx.array(value) for key, value in made.media.items()}
        embeds = self.model.get_input_embeddings(ids, given.pop("pixel_values"), **given).inputs_embeds
        return np.array(ids[0] == self.model.config.image_token_index), np.array(embeds[0])


@pytest.mark.parametrize("family", ["llava_next", "granite_vision"])
def test_each_token_has_a_feature(tmp_path: Path, family: str) -> None:
    """For images of any shape. Two images of other numbers of tiles have the features that each has alone."""
    made = Family(family, tmp_path / "model")
    assert hook_tiles(made.model, made.info.config) == 1
    alone = []
    for size in SIZES:
        is_image, embeds = made.embed(size)
        assert len(embeds) == len(is_image)
        alone.append(embeds[is_image])
    is_image, embeds = made.embed(SIZES[1], SIZES[3])
    expected = np.concatenate([alone[1], alone[3]])
    assert np.abs(embeds[is_image] - expected).max() < 1e-5


def test_grids_have_a_row_for_each_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-VL2's model reads as many; those that no image has are zeros. Its features are the same
    again."""
    made = Family("deepseek_vl_v2", tmp_path / "model")
    assert hook_tiles(made.model, made.info.config) == 1
    seen: list[list[list[int]]] = []
    process = type(made.model).process_image_features

    def watch(self: Any, embeds: mx.array, features: mx.array, grids: mx.array, *given: Any) -> mx.array:
        seen.append(grids[0].tolist())
        return process(self, embeds, features, grids, *given)

    monkeypatch.setattr(type(made.model), "process_image_features", watch)
    found = [made.embed(SIZES[0])[1] for _ in range(2)]
    assert seen == [[[2, 2], [0, 0], [0, 0], [0, 0], [0, 0]]] * 2  # the small image, and four tiles
    assert np.array_equal(*found)


def test_features_are_those_of_the_image_wherever_it_is(tmp_path: Path) -> None:
    """PaliGemma's library has them right where the prompt begins with the image."""
    made = Family("paligemma", tmp_path / "model")
    prompt = made.info.process("<image>ab", [Image.new("RGB", (40, 30), (9, 99, 200))])
    ids, pixels = list(prompt.ids), mx.array(prompt.media["pixel_values"])
    mask = mx.ones((1, len(ids)))
    first = np.array(made.model.get_input_embeddings(mx.array([ids]), pixels, mask).inputs_embeds[0])
    assert hook_tiles(made.model, made.info.config) == 1
    for at in (0, 1, 2):
        moved = [*ids[-at:], *ids[:-at]] if at else ids
        found = made.model.get_input_embeddings(mx.array([moved]), pixels, mask)
        assert np.array_equal(np.roll(first, at, axis=0), np.array(found.inputs_embeds[0]))
    with pytest.raises(ValueError, match="one image in a prompt"):
        made.model.get_input_embeddings(mx.array([ids]), mx.concatenate([pixels] * 2))


def test_text_and_other_models_are_left_alone(tmp_path: Path) -> None:
    made = Family("llava_next", tmp_path / "model")
    ids = mx.array([[1, 2, 3]])
    before = np.array(made.model.get_input_embeddings(ids).inputs_embeds)
    assert hook_tiles(made.model, {}) == 0  # a checkpoint without tiles
    hook_tiles(made.model, made.info.config)
    assert np.array_equal(np.array(made.model.get_input_embeddings(ids).inputs_embeds), before)
    assert hook_tiles(made.model.language_model, made.info.config) == 0


def test_other_than_as_many_features_as_tokens_are_an_error(tmp_path: Path) -> None:
    made = Family("llava_next", tmp_path / "model")
    hook_tiles(made.model, made.info.config | {"image_grid_pinpoints": [[32, 32]]})
    with pytest.raises(ValueError, match="features of images for"):
        made.embed((64, 64))


def test_without_the_hook_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: the library has other than as many embeddings as tokens."""
    monkeypatch.setattr(install, "hook_tiles", lambda model, checkpoint: 0)
    result = check_family("vision", "llava_next", brief=True)
    assert result.status == "refused" and "mlx-vlm makes 181 embeddings of the 180 tokens" in result.why
