"""What a recurrent layer sees as its cache in a forward with drafts, and how that is computed in passes.

`route_states` routes the calls of a model's modules that take a cache. A module that is called with a
`DraftedState` and touches it is the one that updates the state: it is called once for each pass
(pass_layout.py), with the states that the pass before left, and its results are put back into their rows. All
other modules compute all rows at once. Which module it is shows when it first touches the state: what it had
computed until then is thrown away, unevaluated.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxrun.model.ragged.attention import NotRaggedError
from mlxrun.model.ragged.hoisted_calls import HoistedCalls
from mlxrun.model.ragged.pass_layout import LayerPass, PassLayout

States = list[mx.array | None]  # of one layer, by slot


class StateTouchedError(NotRaggedError):
    """A module touched the state that it was called with; whoever routed its call handles this."""

    def __init__(self, state: DraftedState) -> None:
        frame = inspect.currentframe()  # of this function, of the state's method, and of who called that
        caller = frame and frame.f_back and frame.f_back.f_back
        name = "a module" if caller is None else caller.f_code.co_qualname
        super().__init__(f"{name} reads a recurrent state where rows cannot be computed in passes")
        self.state = state


class DraftedState:
    """One STATE layer. `first`: its cache with the states of the rows of the first pass. `updaters`: the
    modules that are known to update a state, by id; is added to. What a library keeps in a cache beside the
    states can be read and written."""

    lengths = None  # as in every batch of rows with one token each
    left_padding = None

    def __init__(self, first: Any, layout: PassLayout, updaters: dict[int, nn.Module]) -> None:
        vars(self).update({name: value for name, value in vars(first).items() if name != "cache"})
        self._first, self._layout, self._updaters = first, layout, updaters
        self._after: list[States] = []  # by pass

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self._first.make_mask(*args, **kwargs)

    def advance(self, N: int) -> None:
        """Rows of one token each have nothing to count."""

    def __getitem__(self, slot: int) -> Any:
        raise StateTouchedError(self)

    def __setitem__(self, slot: int, value: Any) -> None:
        raise StateTouchedError(self)

    def __getattr__(self, name: str) -> Any:
        if name == "cache" or hasattr(type(self._first), name):
            raise StateTouchedError(self)
        raise AttributeError(name)

    def list_kept(self) -> list[States]:
        """For each pass the states that it left of the rows that have a token in it. NotRaggedError if no
        module updated the state."""
        if not self._after:
            raise NotRaggedError("the model did not update a recurrent state")
        pairs = zip(self._layout.passes, self._after, strict=True)
        # A later pass is mostly of dummies where its width is fixed: a view would keep those.
        return [
            [None if a is None else step.kept.take(a, copied=step.previous is not None) for a in states]
            for step, states in pairs
        ]

    def compute(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a module that was called with this object among its arguments."""
        if id(module) not in self._updaters:
            before = self._after
            try:
                return call(module, *args, **kwargs)
            except StateTouchedError as error:
                if error.state is not self:
                    raise
            self._after = before  # a module inside it may have updated it already
            self._updaters[id(module)] = module
        return self._compute_passes(call, module, args, kwargs)

    def _compute_passes(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hoisted, after = HoistedCalls(module, self._layout), list[States]()
        outputs: list[Any] = []
        changed: set[int] = set()  # slots that this module updates
        cache = copy.copy(self._first)

        def give(leaf: Any) -> Any:
            if leaf is self:
                return cache
            is_rows = isinstance(leaf, mx.array) and leaf.ndim and leaf.shape[0] == self._layout.total
            return hoisted.take(leaf) if is_rows else leaf

        with hoisted.replace_layers():
            for index, step in enumerate(self._layout.passes):
                cache = copy.copy(self._first)
                cache.cache = self._start_pass(index, step, after, changed)
                before = list(cache.cache)
                with hoisted.begin_pass(step):
                    given, named = tree_map(give, (list(args), kwargs))
                    outputs.append(call(module, *given, **named))
                changed |= {i for i, (a, b) in enumerate(zip(before, cache.cache, strict=True)) if a is not b}
                after.append(cache.cache)
        self._after = after
        return hoisted.join(outputs)

    def _start_pass(self, index: int, step: LayerPass, after: Sequence[States], changed: set[int]) -> States:
        """The states with which a pass begins: in slots that the module changes, those of its pass before; in
        others, what another module left in this pass."""
        others = self._after[index] if self._after else None
        if step.previous is None:
            return list(others or self._first.cache)
        previous = [None if a is None else step.previous.take(a) for a in after[-1]]
        if others is None:
            return previous
        return [a if slot in changed else b for slot, (a, b) in enumerate(zip(previous, others, strict=True))]


def route_states(model: nn.Module) -> None:
    """Route the calls of all modules of the model that take a cache. Idempotent."""
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        call = vars(kind).get("__call__")
        if call is None or not issubclass(kind, nn.Module) or getattr(call, "routes_states", False):
            continue
        if "cache" in inspect.signature(call).parameters:
            setattr(kind, "__call__", _make_routed(call))  # noqa: B010


def _make_routed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if type(given) is DraftedState:
                return given.compute(call, self, args, kwargs)
        return call(self, *args, **kwargs)

    compute.routes_states = True  # type: ignore[attr-defined]
    return compute
