"""Decides by the machine and the model: the form of weights, the use of the kernel, and limits of memory.

Each function takes numbers, asks no device, and gives its reason. docs/machines.md is made from them. In
reproducible mode no decision that changes bits depends on a timing, or on what other programs use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from mlxrun.core.byte_sizes import format_rounded

Backend = Literal["metal", "cuda", "cpu"]
# plain: nothing is quantized; quantized: as in the files; held: dequantized at load; timed: whichever takes
# less time; timed_methods: quantized, multiplied by the fastest method; refused: with an error.
WeightsInMemory = Literal["plain", "quantized", "held", "timed", "timed_methods", "refused"]
KernelUse = Literal["none", "checked", "timed"]
Value = TypeVar("Value")

# Of the memory that is free when the engine starts, where programs share it. More, and the machine swaps as
# soon as a browser wants it back: a step then takes seconds. Less, and fewer rows run, or a model is refused.
FREE_SHARE = 0.8
# Of the memory limit, that dequantized weights may take. More leaves no room for rows; less keeps models
# quantized on a CPU, where those products take several times as long.
HELD_SHARE = 0.5
# Of the memory limit on Metal, that the pool of free buffers may keep; MLX's own limit is most of the memory.
# More is memory that neither rows nor other programs have; less, and large buffers are allocated each step.
POOL_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of a machine, in bytes. `total`: what the device has, or this process may use of it;
    `recommended`: the device's own advice, 0 on a CPU; `free`: free or already in this process, 0 if
    unknown."""

    backend: Backend
    total: int
    recommended: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class Decision(Generic[Value]):
    """A decision, and its reason in words."""

    value: Value
    reason: str


def decide_memory_limit(machine: Machine, given: int | None = None) -> Decision[int]:
    """Bytes for weights, caches and temporary arrays; 0 if nothing is known. `given`: as in the config."""
    if given is not None:
        return Decision(given, "scheduler.memory_limit")
    shared = int(machine.free * FREE_SHARE)
    if machine.backend == "cuda":
        return Decision(machine.recommended, "the GPU's own memory")
    if machine.recommended and not shared:
        return Decision(machine.recommended, "what Metal recommends, as the free memory is unknown")
    free = f"{FREE_SHARE:.0%} of the {format_rounded(machine.free)} that are free"
    if machine.recommended and machine.recommended <= shared:
        return Decision(machine.recommended, "what Metal recommends, and more is free")
    if machine.recommended:
        return Decision(shared, f"{free}; Metal recommends {format_rounded(machine.recommended)}")
    return Decision(shared, free if shared else "the free memory is unknown")


def decide_pool(machine: Machine, limit: int) -> Decision[int | None]:
    """Bytes that MLX's pool of free buffers may keep; None: as many as MLX chooses."""
    if machine.backend != "metal" or not limit:
        own = {"cuda": "nobody else waits for the GPU's memory", "cpu": "it keeps 32 MiB at most"}
        return Decision(None, own.get(machine.backend, "the memory limit is unknown"))
    return Decision(int(limit * POOL_SHARE), f"{POOL_SHARE:.1%} of the memory limit")


def decide_wired(machine: Machine, limit: int) -> Decision[int | None]:
    """Bytes that the system must not move out of memory; None: they are not limited, or cannot be.

    More than the memory limit takes other programs' memory for good. With less, macOS may compress weights
    between two requests, and the first token waits for them."""
    if machine.backend != "metal":
        return Decision(None, "only Metal wires memory")
    if not limit or limit >= machine.recommended:
        return Decision(machine.recommended, "what Metal recommends, the most that it takes")
    return Decision(limit, "the memory limit")


def decide_weights(
    backend: Backend,
    dequantized: int | None,
    limit: int,
    choice: Literal["auto", "never", "always"] = "auto",
    reproducible: bool = False,
) -> Decision[WeightsInMemory]:
    """The form of weights in memory. `dequantized`: the bytes that quantized ones take as plain numbers,
    None if none are quantized. Experts on a GPU are not counted, as they stay quantized. `limit`: the memory
    limit, in reproducible mode the one that does not depend on what is free.

    A wrong choice costs memory, two to eight times that of the weights, or the time of slow products."""
    if dequantized is None:
        return Decision("plain", "nothing is quantized")
    if choice == "always":
        return Decision("held", "model.dequantize: always")
    untimed = "with engine.reproducible nothing is timed"
    is_cpu = backend == "cpu"
    if choice == "never":
        if is_cpu and not reproducible:
            return Decision("timed_methods", "model.dequantize: never")
        return Decision("quantized", "model.dequantize: never")
    if backend == "metal":
        # Nobody has measured it here. Wrong, and many rows take longer than they might.
        return Decision("quantized", "Metal multiplies them well, and its memory is shared")
    most = int(limit * HELD_SHARE)
    fits = dequantized <= most
    size = (
        f"dequantized they take {format_rounded(dequantized)}, "
        f"and {HELD_SHARE:.0%} of the limit is {format_rounded(most)}"
    )
    if not dequantized:
        return Decision("quantized", "only experts are quantized, which decode as fast so")
    if reproducible:
        if not fits and limit:
            return Decision("refused", f"{untimed}; {size}")
        return Decision("held", untimed)
    if fits:
        return Decision("timed", f"{size}: products are timed")
    return Decision("timed_methods" if is_cpu else "quantized", size if limit else "the limit is unknown")


def decide_kernel(
    backend: Backend, reproducible: bool = False, load_check: bool = True
) -> Decision[KernelUse]:
    """How the attention kernel of pages is accepted. Its results must equal those of the library's attention.

    A wrong choice makes each decoded token take up to twice as long at many rows, but no answer wrong.
    """
    if backend == "cpu":
        return Decision("none", "it is for GPUs")
    if not load_check:
        return Decision("none", "it has to be compared, and engine.load_check is off")
    if reproducible:
        return Decision("checked", "if it computes what the library does, as nothing is timed")
    return Decision("timed", "if it computes what the library does, and takes at most 1.5 times as long")
