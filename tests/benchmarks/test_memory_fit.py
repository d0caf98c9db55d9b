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


def test_the_command_names_unknown_shapes() -> None:
    done = CliRunner().invoke(command, ["memory-fit", "no such one"])
    assert done.exit_code == 2 and "no such shape: no such one; there are dense, few keys" in done.output
