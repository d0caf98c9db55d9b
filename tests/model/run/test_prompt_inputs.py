"""The inputs of a prompt beyond its token ids."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxrun.model.run.prompt_inputs import TEXT_ONLY, PromptInputs


def test_inputs_list_their_arrays() -> None:
    """Those of MLX: all that has to be evaluated."""
    assert PromptInputs().list_arrays() == TEXT_ONLY.list_arrays() == []
    arrays = [mx.zeros((1, 2)) for _ in range(5)]
    inputs = PromptInputs(
        embeds=arrays[0],
        positions=arrays[1],
        per_layer=arrays[2],
        deepstack=(arrays[3], arrays[4]),
        visual_mask=np.zeros(2, bool),
    )
    assert [id(array) for array in inputs.list_arrays()] == [id(array) for array in arrays]
