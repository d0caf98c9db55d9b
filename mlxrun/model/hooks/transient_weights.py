"""Bounds the memory of weights that are dequantised for one product each, while a prompt is computed.

A GPU computes what was launched later than the host goes on, and each product that waits has its weight in
memory already. In a block of `bound_transients`, products are launched after so many numbers of such weights,
and the host waits for earlier ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

LAUNCHED = 1 << 27  # numbers of dequantised weights that are launched together
MOST_LAUNCHES = 2  # that are not computed yet


class _Transients:
    """Those of the engine thread. `numbers`: of weights whose products are not launched."""

    bounded = False
    numbers = 0
    launched: deque[mx.array] = deque()


@contextmanager
def bound_transients() -> Iterator[None]:
    """Bound the weights of `record_product` in this block, which must not be compiled."""
    before = _Transients.bounded
    _Transients.bounded = True
    try:
        yield
    finally:
        _Transients.bounded, _Transients.numbers = before, 0
        _Transients.launched.clear()


def are_bounded() -> bool:
    """Whether this is in a block of `bound_transients`."""
    return _Transients.bounded


def record_product(product: mx.array, numbers: int) -> mx.array:
    """The product, of a weight with so many numbers that is dequantised for it alone. May launch it, and wait
    for earlier ones."""
    if _Transients.bounded:
        _Transients.numbers += numbers
        if _Transients.numbers >= LAUNCHED:
            _Transients.numbers = 0
            mx.async_eval(product)
            _Transients.launched.append(product)
            if len(_Transients.launched) > MOST_LAUNCHES:
                mx.eval(_Transients.launched.popleft())
    return product
