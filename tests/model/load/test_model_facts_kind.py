"""`model.kind`, and checkpoints without the tower that their config describes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.media_kinds import MediaRef
from mlxrun.config.settings import MediaSettings, ModelSettings
from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.model.doctor import report_model
from mlxrun.model.load import model_facts
from mlxrun.model.load.model_facts import NO_LIBRARY, NO_TOWER, choose_kind, list_tensor_names
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo


def load(path: Path, **settings: Any) -> LoadedModelInfo:
    return load_model_info(ModelSettings(path=str(path), **settings))


@pytest.fixture
def towerless(zoo: Zoo, tmp_path: Path) -> Path:
    """The text weights of a vision model with its whole config, as converters for text leave them."""
    folder = tmp_path / "towerless"
    shutil.copytree(zoo.vision("qwen3_vl"), folder)
    file = str(folder / "model.safetensors")
    kept = {name: value for name, value in mx.load(file).items() if name.startswith("language_model.")}
    mx.save_safetensors(file, kept, metadata={"format": "mlx"})
    return folder


def test_a_checkpoint_without_its_tower_is_a_text_model(
    zoo: Zoo, towerless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and doctor say so; its answers are those of the whole model without images."""
    with caplog.at_level(logging.WARNING, "mlxrun.model.load.model_facts"):
        info = load(towerless)
    assert not info.vision and info.kind_note == NO_TOWER and NO_TOWER in caplog.text
    assert NO_TOWER in report_model("towerless", info).value
    ids = text_models.prompts(5, [20])[0]
    engine = engine_driver.make_real_engine(towerless, load_check=False)
    event = engine_driver.run_requests(engine, [engine_driver.make_text_request("a", ids)])["a"]
    engine_driver.check_answer(event, zoo.see("qwen3_vl", ids))


async def test_it_takes_no_images(towerless: Path) -> None:
    """A 400 that names the image."""
    images = [MediaRef("data:image/png;base64,AAAA", "messages[0].content[0]")]
    with pytest.raises(
        RequestError,
        match=r"messages\[0\]\.content\[0\]: the model .* does not accept images: the checkpoint has no",
    ):
        async with MediaLoader(MediaSettings(), None).load_images(images, load(towerless)):
            pass


def test_it_cannot_be_made_to_see(towerless: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model\.kind: vision, but .* no weights of a vision tower"):
        load(towerless, kind="vision")


def test_without_its_library_a_model_that_sees_is_a_text_model(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If mlx-lm has its text part. Else the error names what to install, as it does if it shall see."""
    monkeypatch.setattr(model_facts, "find_spec", lambda name: None)
    folder = zoo.vision("qwen3_vl")
    with caplog.at_level(logging.WARNING, "mlxrun.model.load.model_facts"):
        info = load(folder)
    assert not info.vision and info.kind_note == NO_LIBRARY and NO_LIBRARY in caplog.text
    assert info.refused_media == dict.fromkeys(("images", "videos", "audio"), NO_LIBRARY)
    install = r"needs mlx-vlm: pip install 'mlxrun\[vision\]'"
    with pytest.raises(ModelLoadError, match=rf"^model\.kind: vision {install}"):
        load(folder, kind="vision")
    config = {"model_type": "paligemma", "vision_config": {"a": 1}}
    with pytest.raises(ModelLoadError, match=rf"{folder}: this model {install}"):
        choose_kind(ModelSettings(), config, folder)


def test_without_that_library_the_built_in_model_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_facts, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "mlxrun.model.load.model_facts"):
        assert load(EMBEDDED).kind_note == NO_LIBRARY
    assert [(record.levelname, NO_LIBRARY in record.message) for record in caplog.records] == [("INFO", True)]


def test_the_index_names_the_tensors_of_a_sharded_checkpoint(zoo: Zoo, towerless: Path) -> None:
    """So a model of the hub is known before its weights are there."""
    whole = list_tensor_names(zoo.vision("qwen3_vl"))
    assert whole and any(name.startswith("vision_tower.") for name in whole)
    (towerless / "model.safetensors").unlink()
    config = json.loads((towerless / "config.json").read_text())
    assert list_tensor_names(towerless) is None
    assert choose_kind(ModelSettings(), config, towerless).vision
    index = {"weight_map": {"language_model.model.norm.weight": "model-1.safetensors"}}
    (towerless / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not choose_kind(ModelSettings(), config, towerless).vision


def test_damaged_weights_are_named(towerless: Path) -> None:
    for data in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[["):
        (towerless / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: the header of the weights cannot"):
            list_tensor_names(towerless)


def test_the_kind_overrides_what_is_detected(zoo: Zoo) -> None:
    """Or is refused because the library of that kind does not have the architecture."""
    assert load(zoo.vision("qwen3_vl")).vision
    assert not load(zoo.vision("qwen3_vl"), kind="text").vision
    with pytest.raises(
        ModelLoadError, match=r"model\.kind: .*mlx-lm does not have the architecture 'idefics3'"
    ):
        load(zoo.vision("idefics3"), kind="text")
    with pytest.raises(ModelLoadError, match=r"model\.kind: vision.*no vision_config.*mlx-vlm does not have"):
        load(zoo.text("mamba2"), kind="vision")


@pytest.mark.parametrize(
    ("config", "vision"),
    [
        ({"vision_config": {"depth": 2}}, True),
        ({"thinker_config": {"vision_config": {"depth": 2}}}, True),
        ({"thinker_config": {"vision_config": None}, "text_config": {}}, False),
    ],
)
def test_a_vision_config_may_be_in_a_part(zoo: Zoo, config: dict[str, Any], vision: bool) -> None:
    folder = zoo.vision("qwen3_vl")
    assert choose_kind(ModelSettings(path=str(folder)), config, folder).vision is vision
