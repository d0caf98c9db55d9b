"""Tries the fastest methods first, and slower ones if they differ from the library, down to its own calls.

Every method is compared, the slowest too: prompts at once, rows one by one, the library's own attention. A
model without a matching method is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.load_check.attention_checks import KernelCheck
from mlxrun.model.load_check.layer_checks import LIBRARY_LAYERS, check_layers
from mlxrun.model.load_check.long_reference import LongReference
from mlxrun.model.load_check.reference import Reference, list_windows
from mlxrun.model.load_check.report import LoadCheck
from mlxrun.model.load_check.rounding import CheckLogits
from mlxrun.model.load_check.text_checks import TextChecks
from mlxrun.model.machine.decisions import decide_kernel
from mlxrun.model.machine.device import get_backend, uses_gpu
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import (
    LIBRARY_CHUNK,
    AttentionMethod,
    ComputeMethods,
    DecodeMethod,
    uses_pages,
)

IN_CHUNKS = (
    f"prompts are split as the library splits them, every {LIBRARY_CHUNK} tokens, without a prefix cache"
)

AT_ONCE = "each prompt is computed at once, without a prefix cache"
LIBRARY_ATTENTION = "the library's attention"
QUANTIZED = "decode quantized"
CHECKED_START = 3  # tokens, instead of a larger `cache.kv_start`: one of the rows crosses it
SLOWER_DECODE: dict[DecodeMethod, str] = {
    "fused": LIBRARY_LAYERS,
    "compiled": "a forward that is not compiled",
    "paged": "attention by groups of rows of similar length",
    "ragged": "one forward for rows of similar length",
    "grouped": "one forward for each row",
    "row_by_row": LIBRARY_ATTENTION,
}


class RefusedModelError(ModelLoadError):
    """No method of computing the model matches the library. `checks`: the comparisons."""

    def __init__(self, message: str, checks: Sequence[LoadCheck]) -> None:
        super().__init__(message)
        self.checks = tuple(checks)


class TextLadder:
    """Finds the methods. `reference`: short prompts. `long`: a long row beside a short one; None if the model
    has none."""

    def __init__(
        self,
        reference: Reference,
        long: LongReference | None,
        candidate: ComputeMethods,
        quantization: KVQuantization | None,
    ) -> None:
        self._reference = reference
        self._quantization = quantization
        self._candidate = candidate
        use = decide_kernel(get_backend(), reproducible=candidate.fixed_width > 0).value
        kernel = KernelCheck(timed=use == "timed") if uses_gpu() else None
        references = (reference,) if long is None else (reference, long)
        self._sides = [TextChecks(each, candidate.snapshots, kernel) for each in references]
        self.checks: list[LoadCheck] = []

    @property
    def refusal(self) -> RefusedModelError:
        """The error that says why the model cannot be used."""
        failed = [check for check in self.checks if not check.passed]
        named = "; ".join(f"{check.name}: {check.describe()}" for check in failed[-2:])
        text = "the model is refused: no way to compute it gives the logits of the library's own calls"
        return RefusedModelError(f"{text} ({named})", self.checks)

    def compare(self) -> ComputeMethods:
        """The methods that pass. RefusedModelError if none passes."""
        for attention in get_args(AttentionMethod):
            self._reference.caller.attention = attention
            methods = self._compare_with(attention)
            if methods is not None:
                return self._choose_extras(methods)
        raise self.refusal

    def require_rows(self, methods: ComputeMethods) -> None:
        """Compare rows that are decoded one by one, unless they were. RefusedModelError if they differ."""
        name = self._name("decode row_by_row")
        known = [check.passed for check in self.checks if check.name == name]
        if not (all(known) if known else self._passes_decode("row_by_row", methods.fixed_width)):
            raise self.refusal

    def _name(self, name: str) -> str:
        own = self._reference.caller.attention == "engine"
        return name if own else f"{name}, library attention"

    def _compare_with(self, attention: AttentionMethod) -> ComputeMethods | None:
        """The methods of prompts and rows that pass with this attention; None if none do."""
        methods = replace(self._candidate, attention=attention, fused_prompts=False)
        whole = methods.whole_prompts
        instead = AT_ONCE if whole else IN_CHUNKS
        if not self._passes("prefill chunks", lambda runs: runs.prefill(split=True), instead) or whole:
            methods = methods.split_as_library()
            if not self._passes("prefill whole", lambda runs: runs.prefill(split=False), LIBRARY_ATTENTION):
                return None
        decode = self.choose_decode(methods)
        return None if decode is None else replace(methods, decode=decode)

    def _choose_extras(self, methods: ComputeMethods) -> ComputeMethods:
        """The same with what several prompts share, and with snapshots, where these pass. Without them, each
        prompt is computed by itself, as was compared."""
        if methods.decode == "ragged" and self._quantization is not None:
            self._check_quantization(self._quantization)
        methods = replace(methods, fused_prompts=self._choose_prompts(methods))
        methods = replace(methods, sharing=self._choose_sharing(methods.sharing))
        if methods.snapshots:
            without = "prompts are always computed whole: no prefix cache"
            # Keys and values are copied alike, however many there are.
            short = self._sides[0].keeps_keys_only
            passes = self._passes("snapshot", TextChecks.restore_snapshots, without, short=short)
            methods = replace(methods, snapshots=passes)
        return methods

    def _choose_prompts(self, methods: ComputeMethods) -> bool:
        """Whether fused layers compute prompts. What follows is then compared with such prompts."""
        caller = self._reference.caller
        wanted = self._candidate.fused_prompts and methods.decode == "fused" and methods.attention == "engine"
        if wanted and not methods.library_chunks:
            caller.fused_prompts = True
            caller.fused_prompts = self._passes(
                "prefill fused", lambda runs: runs.prefill(split=True), LIBRARY_LAYERS
            )
        return caller.fused_prompts

    def _passes(
        self, name: str, run: Callable[[TextChecks], CheckLogits], instead: str, *, short: bool = False
    ) -> bool:
        """Whether all rows pass. `short`: without the long ones."""
        for runs in self._sides[:1] if short else self._sides:
            own = self._name(name + runs.reference.suffix)
            self.checks.append(runs.reference.check(own, partial(run, runs), instead=instead))
            if not self.checks[-1].passed:
                return False
        return True

    def choose_decode(self, methods: ComputeMethods) -> DecodeMethod | None:
        """The fastest method that passes; None if none does."""
        methods_left: Sequence[DecodeMethod] = get_args(DecodeMethod)
        first = "paged" if uses_pages(methods.decode) else methods.decode
        for method in methods_left[methods_left.index(first) :]:
            if not self._passes_decode(method, methods.fixed_width):
                continue
            return self._choose_paged(methods) if method == "paged" else method
        return None

    def _choose_paged(self, methods: ComputeMethods) -> DecodeMethod:
        """The fastest method of rows in pages. Each is tried once the next slower one has passed."""
        order: Sequence[DecodeMethod] = get_args(DecodeMethod)
        chosen = order.index("paged")
        while chosen > order.index(methods.decode) and self._passes_faster(order[chosen - 1], methods):
            chosen -= 1
        return order[chosen]

    def _passes_faster(self, method: DecodeMethod, methods: ComputeMethods) -> bool:
        if method == "fused":
            self.checks.append(check_layers(self._reference.caller.text_model))
            if not self.checks[-1].passed:
                return False
        return self._passes_decode(method, methods.fixed_width)

    def _passes_decode(self, method: DecodeMethod, width: int) -> bool:
        copied = [runs.copied for runs in self._sides]
        if self._passes(f"decode {method}", lambda runs: runs.decode(method, width), SLOWER_DECODE[method]):
            return True
        for runs, own in zip(self._sides, copied, strict=True):
            runs.copied = own  # the copy of a row that decoded wrongly says nothing about copies
        return False

    def _check_quantization(self, quantization: KVQuantization) -> None:
        short, runs = quantization._replace(start=min(quantization.start, CHECKED_START)), self._sides[0]
        run, expected = partial(runs.decode, "ragged", 0, short), partial(runs.round_rows, short)
        self.checks.append(self._reference.check(QUANTIZED, run, expected))

    def _choose_sharing(self, sharing: PrefillSharing) -> PrefillSharing:
        passes, rows, padded = partial(self._passes, short=True), sharing.max_rows, sharing.max_padded
        alone = "each prompt has its own forward"
        if rows > 1 and not passes("prefill equal lengths", TextChecks.prefill_equal, alone):
            rows = 1
        equal = "only prompts of equal length share a forward"
        if rows > 1 and padded:
            limit = min([padded, *list_windows(self._reference.make_cache())])
            padded = padded if passes("prefill padded", lambda runs: runs.prefill_padded(limit), equal) else 0
        tails = rows > 1 and sharing.tails
        if tails:
            own = "what is left of a prompt has its own forward"
            tails = passes("prefill tails", lambda runs: runs.prefill_tails(padded > 0), own)
        return replace(sharing, max_rows=rows, max_padded=padded, tails=tails)
