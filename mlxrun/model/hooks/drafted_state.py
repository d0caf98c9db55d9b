"""The cache that a recurrent layer sees in a forward with drafts, and how its rows are computed.

`hook_states` routes the calls of a model's modules that take a cache. The module that touches its
`DraftedState` is the one that updates the state. It is called once for each call of the layout
(draft_layout.py), with ordinary caches, and its results are put back into their rows. All other modules
compute all rows at once. The first touch shows which module it is; what it computed before is dropped,
unevaluated.

That module's layers of weights are called with all rows where possible: those that take its inputs, and the
one that gives its output. So a forward with drafts reads these weights once. Both are found by the identity
of arrays. Arrays are lazy, so a result that is made again from all rows was never computed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxrun.model.hooks.attention import NotRaggedError
from mlxrun.model.hooks.draft_layout import ChosenStates, DraftLayout, LayerCall, RowChoice

States = list[mx.array | None]  # of one layer, by slot


class StateTouchedError(NotRaggedError):
    """A module touched the state that it was called with. The router of its call handles this."""

    def __init__(self, state: DraftedState) -> None:
        super().__init__()
        self.state = state

    def __str__(self) -> str:
        """The message, with the function that touched the state, by the traceback."""
        codes = (frame.f_code for frame, _ in traceback.walk_tb(self.__traceback__))
        names = [code.co_qualname for code in codes if code.co_filename != __file__]
        name = names[-1] if names else "a module"
        return f"{name} reads a recurrent state where rows cannot be computed one after the other"


@dataclass(frozen=True, slots=True)
class _Update:
    """A module that updated the state, and what it was called with. `slots`: those that it changes."""

    call: Callable[..., Any]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hoisted: HoistedCalls
    slots: set[int]

    def run(self, state: DraftedState, cache: Any, call: LayerCall, total: int) -> Any:
        """The module's result for these rows, which have their states in `cache`."""

        def give(leaf: Any) -> Any:
            if leaf is state:
                return cache
            is_rows = isinstance(leaf, mx.array) and leaf.ndim and leaf.shape[0] == total
            return self.hoisted.take(leaf) if is_rows else leaf

        before = list(cache.cache)
        with self.hoisted.begin_call(call):
            args, kwargs = tree_map(give, (list(self.args), self.kwargs))
            result = self.call(self.module, *args, **kwargs)
        pairs = enumerate(zip(before, cache.cache, strict=True))
        self.slots.update(slot for slot, (old, new) in pairs if old is not new)
        return result


class DraftedState:
    """One STATE layer in a forward with drafts.

    `first`: its cache with the states of all rows before the forward. `updaters`: modules that are known to
    update a state, by id; new ones are added. Other attributes of a library's cache can be read and written.
    """

    lengths = None  # as in every batch of rows with one token each
    left_padding = None

    def __init__(self, first: Any, layout: DraftLayout, updaters: dict[int, nn.Module]) -> None:
        vars(self).update({name: value for name, value in vars(first).items() if name != "cache"})
        self._first, self._layout, self._updaters = first, layout, updaters
        self._updates: list[_Update] = []
        self._after: list[States] = []  # what each call of the layout left

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self._first.make_mask(*args, **kwargs)

    def advance(self, N: int) -> None:
        """Do nothing, since rows of one token each have nothing to count."""

    def __getitem__(self, slot: int) -> Any:
        raise StateTouchedError(self)

    def __setitem__(self, slot: int, value: Any) -> None:
        raise StateTouchedError(self)

    def __getattr__(self, name: str) -> Any:
        if name == "cache" or hasattr(type(self._first), name):
            raise StateTouchedError(self)
        raise AttributeError(name)

    def compute(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a module that was called with this object among its arguments."""
        if id(module) not in self._updaters:
            before = self._after, list(self._updates)
            try:
                return call(module, *args, **kwargs)
            except StateTouchedError as error:
                if error.state is not self:
                    raise
            self._after, self._updates = before  # a module inside it may have updated it already
            self._updaters[id(module)] = module
        return self._update(_Update(call, module, args, kwargs, HoistedCalls(module, self._layout), set()))

    def _update(self, update: _Update) -> Any:
        outputs, after = [], list[States]()
        for index, call in enumerate(self._layout.calls):
            cache = copy.copy(self._first)
            cache.cache = self.begin_call(index, call, after, update.slots)
            outputs.append(update.run(self, cache, call, self._layout.total))
            after.append(cache.cache)
        self._after = after
        self._updates.append(update)
        return update.hoisted.join(outputs)

    def begin_call(self, index: int, call: LayerCall, after: Sequence[States], changed: set[int]) -> States:
        """The states with which a call begins. A slot that the module changes holds the state of its call
        before. Another one holds what another module left in this call."""
        others = self._after[index] if self._after else None
        if call.previous is None:
            return list(others or _take_rows(self._first.cache, call.begin))
        own = _take_rows(after[-1], call.previous)
        if others is None:
            return own
        return [a if slot in changed else b for slot, (a, b) in enumerate(zip(own, others, strict=True))]

    def end_forward(self) -> None:
        """Keep what `choose` may need. NotRaggedError if no module updated the state."""
        if not self._updates:
            raise NotRaggedError("the model did not update a recurrent state")
        pairs = zip(self._layout.calls, self._after, strict=True)
        # A later pass is mostly of dummies where its width is fixed: a view would keep those.
        self._after = [_take_rows(a, call.kept, copied=call.previous is not None) for call, a in pairs]

    def list_arrays(self) -> list[mx.array]:
        """The arrays that the forward's logits do not consume."""
        return [a for states in self._after for a in states if a is not None]

    def choose(self, parts: Sequence[ChosenStates], order: RowChoice) -> States:
        """The states of all rows, as `DraftLayout.choose_states` says."""
        found = [
            self._repeat(part.repeat) if part.repeat else _take_rows(self._after[part.call], part.places)
            for part in parts
        ]
        return _take_rows([concatenate_filled(slot) for slot in zip(*found, strict=True)], order)

    def _repeat(self, call: LayerCall) -> States:
        """The states after fewer tokens: those modules are called again, for what the states need of it."""
        cache = copy.copy(self._first)
        cache.cache = _take_rows(self._first.cache, call.begin)
        for update in self._updates:
            update.run(self, cache, call, self._layout.total)
            update.hoisted.forget()
        return list(cache.cache)


def _take_rows(states: Sequence[mx.array | None], rows: RowChoice, *, copied: bool = False) -> States:
    return [None if a is None else rows.take(a, copied=copied) for a in states]


def concatenate_filled(parts: Sequence[mx.array | None]) -> mx.array | None:
    """The states of all rows, part after part. None for a slot that is never filled."""
    filled = [a for a in parts if a is not None]
    return (filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)) if filled else None


def hook_states(model: nn.Module) -> int:
    """Route the calls of all modules of the model that take a cache. Returns how many classes have such
    calls. Idempotent."""
    count = 0
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        call = vars(kind).get("__call__")
        if call is None or not issubclass(kind, nn.Module):
            continue
        if "cache" in inspect.signature(call).parameters:
            count += 1
            if not getattr(call, "routes_states", False):
                setattr(kind, "__call__", _make_routed(call))  # noqa: B010
    return count


def _make_routed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if type(given) is DraftedState:
                return given.compute(call, self, args, kwargs)
        return call(self, *args, **kwargs)

    compute.routes_states = True  # type: ignore[attr-defined]
    return compute


class _StandIn:
    """Stands in for a layer inside the one that is called several times."""

    def __init__(self, layer: nn.Module, calls: HoistedCalls) -> None:
        self._layer, self._calls = layer, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls.call(self._layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class HoistedCalls:
    """Calls the layers inside `module` with all rows, while a layout calls the module itself."""

    def __init__(self, module: nn.Module, layout: DraftLayout) -> None:
        self._module, self._layout = module, layout
        self._layers = {name: x for name, x in module.children().items() if isinstance(x, nn.Module)}
        self._rows = next((m.adapters.rows for m in module.modules() if "adapters" in m), None)
        self._numbers = () if self._rows is None else self._rows.numbers  # of the adapters of all rows
        self._whole: dict[int, tuple[mx.array, mx.array]] = {}  # by id: an array of a call, and of all rows
        self._found: dict[tuple[int, ...], Any] = {}  # what layers gave for all rows
        self._made: dict[int, tuple[mx.array, nn.Module, mx.array]] = {}  # by id: result, its layer and input

    @contextmanager
    def begin_call(self, call: LayerCall) -> Iterator[None]:
        """Within the block, the module is called for the rows of `call`, and calls its layers through this
        object."""
        self._call = call
        for name, layer in self._layers.items():
            dict.__setitem__(self._module, name, _StandIn(layer, self))
        try:
            with self._use_adapters([self._numbers[row] for row in call.firsts] if self._numbers else ()):
                yield
        finally:
            for name, layer in self._layers.items():
                dict.__setitem__(self._module, name, layer)

    def take(self, array: mx.array) -> mx.array:
        """The rows of this call, out of an array of all rows."""
        part = self._call.take(array)
        self._whole[id(part)] = part, array
        return part

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's result for the rows of this call."""
        known = [self._whole.get(id(arg)) for arg in args]
        if args and not kwargs and all(known):
            arrays = [pair[1] for pair in known if pair is not None]
            key = (id(layer), *map(id, arrays))
            if key not in self._found:
                with self._use_adapters(self._numbers):
                    self._found[key] = layer(*arrays)
            found = self._found[key]
            if isinstance(found, mx.array) and found.shape[:2] == (self._layout.total, 1):
                return self.take(found)
        result = layer(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(result, mx.array):
            self._made[id(result)] = result, layer, args[0]
        return result

    def join(self, outputs: Sequence[Any]) -> Any:
        """The results of the module in all calls, for all rows in their order."""
        joined = outputs[0] if outputs[0] is None else tree_map(self._join_arrays, outputs[0], *outputs[1:])
        self.forget()
        return joined

    def forget(self) -> None:
        """Drop the results of the calls, but keep results of all rows, which later calls may use."""
        self._whole.clear()
        self._made.clear()

    def _join_arrays(self, *parts: Any) -> Any:
        if not isinstance(parts[0], mx.array):
            return parts[0]
        made = [self._made.get(id(part)) for part in parts]
        layers = {id(each[1]): each[1] for each in made if each is not None}
        if all(made) and len(layers) == 1:
            (layer,) = layers.values()
            with self._use_adapters(self._numbers):
                return layer(self.gather([each[2] for each in made if each is not None]))
        return self.gather(parts)

    def gather(self, parts: Sequence[mx.array]) -> mx.array:
        """The results of the rows in their order, of what each call computed."""
        pairs = zip(self._layout.calls, parts, strict=True)
        return self._layout.results.take(mx.concatenate([call.flatten(part) for call, part in pairs], axis=0))

    def _use_adapters(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if self._rows is None else self._rows.use(numbers)
