"""Keys and values of a library's cache, rounded as the packed form of quantised rows rounds them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization


class RoundedUpdate:
    """In place of `update_and_fetch` of a KV layer of one row: what quantised attention computes, up to
    rounding, but over plain arrays and with the library's own code."""

    def __init__(self, layer: Any, form: KVQuantization) -> None:
        self._layer = layer
        self._form = form
        self._is_rounded = False

    def __call__(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens [1, H, n, D]; returns all keys and values."""
        layer = self._layer
        if layer.offset >= self._form.start:
            if not self._is_rounded:
                layer.keys, layer.values = self._round(layer.keys), self._round(layer.values)
                self._is_rounded = True
            keys, values = self._round(keys), self._round(values)
        fetched: tuple[mx.array, mx.array] = type(layer).update_and_fetch(layer, keys, values)
        return fetched

    def _round(self, array: mx.array) -> mx.array:
        bits, size, _ = self._form
        return mx.dequantize(*mx.quantize(array, size, bits), size, bits).astype(array.dtype)
