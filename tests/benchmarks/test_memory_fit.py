"""`python -m benchmarks memory-fit`: small models in every run."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import memory_fit
from benchmarks.__main__ import command

NEAR = 0.1


@pytest.mark.parametrize("name", ["dense, few keys", "windows"])
def test_predictions_are_near_of_small_models_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "vocab_size": 4096}
    monkeypatch.setattr(memory_fit, "_COMMON", memory_fit._COMMON | small | {"num_key_value_heads": 4})
    found = memory_fit.measure_shape(name, 6, 600, 4)
    predicted, measured = (max(found[side]["load"], found[side]["run"]) for side in ("predicted", "measured"))
    assert found["predicted"]["weights"] == pytest.approx(found["measured"]["weights"], rel=0.01)
    assert predicted == pytest.approx(measured, rel=NEAR), found


def test_the_encoding_of_an_image_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library evaluates arrays between the layers of this tower, which is left out in the graph."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    text = memory_fit._VISION["text_config"] | heads | {"hidden_size": 128, "intermediate_size": 256}
    tower = memory_fit._VISION["vision_config"] | {"num_heads": 4, "hidden_size": 128, "out_hidden_size": 128}
    text |= {"num_hidden_layers": 2}
    tower |= {"depth": 4}
    monkeypatch.setattr(memory_fit, "SIDE", 320)
    monkeypatch.setattr(memory_fit, "_VISION", {"text_config": text, "vision_config": tower})
    found = memory_fit.measure_shape(memory_fit.IMAGE_SHAPE, output=1)
    weights, predicted, measured = (
        found[side][key] for side, key in (("measured", "weights"), ("predicted", "run"), ("measured", "run"))
    )
    assert predicted - weights == pytest.approx(measured - weights, rel=NEAR), found
    assert predicted > 3 * weights, "the image is most of it"


def test_the_command_names_unknown_shapes() -> None:
    done = CliRunner().invoke(command, ["memory-fit", "no such one"])
    assert done.exit_code == 2 and "no such shape: no such one; there are dense, few keys" in done.output
