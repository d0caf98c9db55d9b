"""Computes the logits of a prompt slice by slice, since those of a whole prompt would not fit in memory.

The libraries' models compute the logits of all tokens of a forward. Nearly all models are a trunk, which
gives hidden states, and a head, which treats each token by itself. The head is a product with the output
embedding, and what the family adds to it (soft caps, scales).

`HiddenStateHook` is a shallow copy of the model with a replaced trunk. It is called once for the hidden
states, and then for each slice of them, so that the model's own code makes the logits. A model is used in
this way only if slices give the logits of the whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.kv.ragged.layer_caches import flatten_caches
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

log = logging.getLogger(__name__)

TRIAL_TOKENS = 7
TRIAL_SLICES = ((0, 3), (3, 7))
# Largest difference of logits that counts as rounding, in units of their standard deviation.
TOLERANCE = {mx.float32: 1e-3}
OTHER_TOLERANCE = 0.1  # of other types

Call = Callable[[ModelCaller], mx.array]  # calls the model of the given caller, and returns its logits


class _Trunk:
    """Stands in for a model's trunk: records what it returns, or returns what was recorded."""

    def __init__(self, trunk: nn.Module) -> None:
        self.original = trunk
        self.recorded: list[mx.array] = []
        self.replayed: mx.array | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.replayed is not None:
            return self.replayed
        hidden = self.original(*args, **kwargs)
        if not isinstance(hidden, mx.array) or hidden.ndim != 3:
            raise TypeError(f"{type(self.original).__name__} does not return hidden states")
        self.recorded.append(hidden)
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class HiddenStateHook:
    """`path`: attributes that lead from a caller's model to its trunk. `caller`: a copy of that caller, which
    calls the copy of the model."""

    def __init__(self, caller: ModelCaller, path: tuple[str, ...]) -> None:
        self.path, self.caller = path, copy.copy(caller)
        place = next(key for key, value in vars(caller).items() if value is caller.text_model)
        parent = copy.copy(caller.text_model)
        setattr(self.caller, place, parent)
        for name in path[:-1]:
            child = copy.copy(parent[name])
            parent[name] = child
            parent = child
        self.trunk: nn.Module = parent.pop(path[-1])  # the model's own
        self._trunk = _Trunk(self.trunk)
        object.__setattr__(parent, path[-1], self._trunk)

    def record(self, call: Call) -> tuple[mx.array, mx.array]:
        """The result of `call`, and the hidden states [B, n, D] of the tokens for which it calls the copy."""
        self._trunk.recorded = []
        try:
            output = call(self.caller)
            parts = self._trunk.recorded
            return output, parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        finally:
            self._trunk.recorded = []

    def compute_hidden(self, call: Call) -> mx.array:
        """Hidden states [B, n, D] of the tokens for which `call` calls the model. No logits are computed."""
        return self.record(call)[1]

    def compute_logits(self, hidden: mx.array, call: Call) -> mx.array:
        """Logits of these hidden states. `call` calls the model for as many tokens."""
        self._trunk.replayed = hidden
        try:
            return call(self.caller)
        finally:
            self._trunk.replayed = None


def find_hidden_hook(caller: ModelCaller) -> HiddenStateHook | None:
    """A hook with the model's own logits. None, with a warning, if there is none."""
    ids = mx.array([[1 + i % 3 for i in range(TRIAL_TOKENS)]])
    expected = caller.prefill(ids, caller.make_cache(), 0, TEXT_ONLY)
    for path in iterate_paths(caller.text_model):
        try:
            hook = HiddenStateHook(caller, path)
            if _is_faithful(hook, caller, ids, expected):
                return hook
        except Exception as error:  # a library's model may raise anything for what it was not made for
            log.debug("no hidden states at %s: %s", ".".join(path), error)
    name = type(caller.text_model).__module__
    log.warning("prompt logprobs: %s does not give hidden states; such chunks take smaller forwards", name)
    return None


def iterate_paths(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Where a trunk may be: the model's parts, and the parts of these (a wrapper's language model)."""
    parts = {name: part for name, part in model.items() if isinstance(part, nn.Module)}
    yield from ((name,) for name in parts)
    for name, part in parts.items():
        yield from ((name, inner) for inner, module in part.items() if isinstance(module, nn.Module))


def _is_faithful(hook: HiddenStateHook, caller: ModelCaller, ids: mx.array, expected: mx.array) -> bool:
    """Whether slices of hidden states that are narrower than the logits give the same logits, and leave the
    caches as they are: else a layer comes after them."""
    cache = caller.make_cache()
    hidden = hook.compute_hidden(lambda own: own.prefill(ids, cache, 0, TEXT_ONLY))
    if hidden.shape[:2] != ids.shape or hidden.shape[-1] >= expected.shape[-1]:
        return False
    before = _identify_contents(cache)
    slices = []
    for start, stop in TRIAL_SLICES:
        call = methodcaller("prefill", ids[:, start:stop], cache, start, TEXT_ONLY)
        slices.append(hook.compute_logits(hidden[:, start:stop], call))
    if _identify_contents(cache) != before:
        return False
    return is_rounding(mx.concatenate(slices, axis=1), expected)


def is_rounding(found: mx.array, expected: mx.array) -> bool:
    """Whether logits differ by rounding only from those that are expected."""
    found, wanted = found.astype(mx.float32), expected.astype(mx.float32)
    limit = TOLERANCE.get(expected.dtype, OTHER_TOLERANCE)
    return bool(mx.max(mx.abs(found - wanted)).item() <= limit * mx.std(wanted).item())


def _identify_contents(cache: list[Any]) -> list[Any]:
    """What the caches hold, by identity."""
    found: list[Any] = []
    for layer in flatten_caches(cache):
        found.append({name: id(value) for name, value in vars(layer).items()})
        found.append([id(item) for item in getattr(layer, "cache", None) or ()])
    return found
