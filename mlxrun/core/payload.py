"""Arrays as bytes: how a payload of the prefix cache travels between the device and a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SerializedTensor:
    """An array as bytes. `dtype` as safetensors calls it: F32, BF16, F16, U32, U8, I64, ..."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class SerializedPayload:
    """A payload outside the device."""

    tensors: Mapping[str, SerializedTensor]
    meta: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())
