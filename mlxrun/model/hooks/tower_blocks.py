"""Records what the blocks of vision towers return, so that one call of a tower can be computed in parts.

MLX computes nothing until it is asked to. So the library's own call builds the graph of all images. What its
blocks return is computed block by block, with other work between. The operations are those of one call, and
so are the bits. Some families evaluate features within their call (`mx.eval`), which is left out meanwhile. A
family that reads their values has computed them by then; then nothing is left to divide.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import mix_in


class _LazyCore:
    """`mlx.core` as a module of the library sees it, which evaluates nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def eval(self, *arrays: Any) -> None:
        """Leave it to whoever needs the values."""


class BlockRecorder:
    """Collects what blocks of a model return within `record`."""

    def __init__(self, model: nn.Module) -> None:
        self._outputs: list[mx.array] | None = None
        names = {base.__module__ for base in type(model).__mro__}
        own = [sys.modules[name] for name in names if name.startswith("mlx_vlm.models.")]
        self._modules = [module for module in own if vars(module).get("mx") is mx]

    @contextmanager
    def record(self) -> Iterator[list[mx.array]]:
        """A list that gets what blocks return within the block of code, in order."""
        self._outputs = []
        for module in self._modules:
            vars(module)["mx"] = _LazyCore()
        try:
            yield self._outputs
        finally:
            self._outputs = None
            for module in self._modules:
                vars(module)["mx"] = mx

    def add(self, output: Any) -> None:
        """Take in what a block returned: an array, or a tuple that begins with one."""
        first = output[0] if isinstance(output, tuple) and output else output
        if self._outputs is not None and isinstance(first, mx.array):
            self._outputs.append(first)


class _RecordedBlock:
    """Before the methods of the library's block."""

    _recorder: BlockRecorder

    def __call__(self, *given: Any, **named: Any) -> Any:
        output = super().__call__(*given, **named)  # type: ignore[misc]
        self._recorder.add(output)
        return output


def hook_blocks(model: nn.Module) -> int:
    """Record the blocks beside a model's language model: layers with parts of their own, in lists. Returns
    how many there are. Idempotent."""
    blocks, recorder = _list_blocks(model), find_recorder(model) or BlockRecorder(model)
    for block in blocks:
        if not isinstance(block, _RecordedBlock):
            mix_in(block, _RecordedBlock, "Recorded")
            block._recorder = recorder
    return len(blocks)


def find_recorder(model: nn.Module) -> BlockRecorder | None:
    """The recorder of a model's blocks; None if the hook is not on."""
    blocks = _list_blocks(model)
    return next((block._recorder for block in blocks if isinstance(block, _RecordedBlock)), None)


def _list_blocks(model: nn.Module) -> list[Any]:
    language = getattr(model, "language_model", None)
    if language is None:
        return []
    own = {id(module) for module in language.modules()}
    lists = [
        value for m in model.modules() if id(m) not in own for value in m.values() if isinstance(value, list)
    ]
    return [each for value in lists for each in value if isinstance(each, nn.Module) and each.children()]
