"""Chooses how a model is computed: the fastest methods that give what the library's own calls give.

Each method is compared at load and in `mlxrun doctor`, on a few short prompts. One that differs is replaced
by a slower exact one, and a warning is logged. No model is trusted because of its name: libraries keep having
bugs of this kind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from mlxrun.config.settings import Config
from mlxrun.errors import ConfigError
from mlxrun.model.adapter import Adapter, VisionAdapter
from mlxrun.model.chunk_grouping import NO_LIMIT, PrefillSharing
from mlxrun.model.compute_methods import (
    LIBRARY_CHUNK,
    ComputeMethods,
    DecodeMethod,
    can_batch,
    can_stack,
    find_padding_limit,
    uses_pages,
)
from mlxrun.model.machine.device import uses_cuda, uses_gpu
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.probe.draft_check import DraftCheck
from mlxrun.model.probe.image_checks import probe_images
from mlxrun.model.probe.reference import ProbeLogits, ProbeRun, Reference
from mlxrun.model.probe.report import ComparedWindow, ProbeCheck, ProbeReport
from mlxrun.model.probe.text_checks import TextChecks
from mlxrun.model.probe.windows import REDUCED, list_windows
from mlxrun.model.quantized_layers import use_library_products
from mlxrun.model.ragged.draft_layout import DraftRecurrence
from mlxrun.model.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.ragged.quantized_buffer import KVQuantization
from mlxrun.model.speculation.support import computes_token_by_token
from mlxrun.scheduler.scheduler import DEFAULT_CHUNK

log = logging.getLogger(__name__)

IN_CHUNKS = (
    f"prompts are split as the library splits them, every {LIBRARY_CHUNK} tokens, without a prefix cache"
)
QUANTISED = "decode quantised"
SHORT_CHUNK = 1024  # tokens of chunks that share a forward on CUDA: those take the time of launching it
PROBED_START = 3  # tokens, instead of a larger `cache.kv_start`: one of the rows crosses it
COMPANIES = (7, 31)  # rows beside one that must have the bits that it has alone
SLOWER_DECODE = {
    "compiled": "a forward that is not compiled",
    "paged": "attention by groups of rows of similar length",
    "ragged": "one forward for rows of similar length",
    "grouped": "one forward for each row",
}


def choose_methods(
    adapter: Adapter,
    vocab: int,
    config: Config,
    model_info: LoadedModelInfo | None = None,
    quantization: KVQuantization | None = None,
) -> ProbeReport:
    """The fastest methods that this model passes; with `engine.probe` off, the fastest possible ones.
    `model_info`: has the processor of images, without which they are not compared. ConfigError if rows are to
    be quantised, and that fails."""
    template = adapter.make_cache()
    candidate = _choose_candidate(template, config, quantization is None)
    if not config.engine.probe:
        return _add_quantization(ProbeReport(candidate, (), adapter.weights), quantization)
    # In half precision, products round each row by itself meanwhile; in float32 they need not, and on a CPU
    # that takes thrice as long.
    rounds = uses_gpu() or config.model.dtype not in ("auto", "float32")
    with use_library_products(adapter.model) if rounds else nullcontext():
        reference = Reference(adapter, vocab)
        methods, checks = _TextLadder(reference, candidate, quantization).compare()
        windows = tuple(ComparedWindow(size, min(size, REDUCED)) for size in list_windows(template))
        found = ProbeReport(methods, tuple(checks), adapter.weights, windows)
        if isinstance(adapter, VisionAdapter):
            found = probe_images(adapter, vocab, model_info, found)
    if found.methods.fixed_width > 1 and found.methods.decode in ("compiled", "paged", "ragged"):
        found = _check_company(found, reference)
    if config.speculation.method != "off" and uses_pages(found.methods.decode):
        found = _check_drafts(found, reference)
    for check in found.checks:
        if not check.passed:
            text = "parity probe: %s is not used for this model: %s%s"
            log.warning(text, check.name, check.describe(), check.describe_instead())
    return _add_quantization(found, quantization)


def _check_company(report: ProbeReport, reference: Reference) -> ProbeReport:
    """The report with whether a row of a fixed width has the same bits in any company, by the products that
    steps have. If not, each row has its own forward, so that `engine.reproducible` holds."""
    runs, methods = TextChecks(reference, False), report.methods
    alone, beside = (partial(runs.decode_beside, methods, some) for some in ((0,), COMPANIES))

    def decode_single_row() -> ProbeLogits:
        own = alone()
        return {(i, step): own[0, step] for i in range(len(COMPANIES)) for _, step in own}

    check = reference.check("same bits in company", beside, decode_single_row, exact=True)
    if not check.passed:
        methods = replace(methods, decode="row_by_row")
        check = replace(check, instead=SLOWER_DECODE["grouped"])
    return replace(report, methods=methods, checks=(*report.checks, check))


def _check_drafts(report: ProbeReport, reference: Reference) -> ProbeReport:
    """The report with how drafts are computed. Where steps must round alike, no bit may differ, with the
    products that steps have; few rows a call cost less, and may round otherwise."""
    methods, fixed = report.methods, report.methods.fixed_width > 0
    states = computes_token_by_token(reference.make_cache())
    for recurrence in get_args(DraftRecurrence)[: 2 + fixed if states else 1]:
        methods = replace(methods, recurrence=recurrence)
        runs = DraftCheck(reference, methods)
        expected = runs.take_steps if fixed else None
        name = f"drafts in {recurrence.replace('_', ' ')}" if states else "drafts"
        with nullcontext() if fixed else use_library_products(reference.adapter.model):
            check = reference.check(name, runs.take_drafts, expected, exact=fixed)
        if check.passed:
            break
    if not check.passed:
        problem = f"rows with drafts are not computed as by steps: {check.describe()}"
        methods = replace(methods, draft_problem=problem)
        check = replace(check, instead="nothing is drafted")
    return replace(report, methods=methods, checks=(*report.checks, check))


def _add_quantization(report: ProbeReport, quantization: KVQuantization | None) -> ProbeReport:
    """The report with quantised rows. ConfigError if this model's rows cannot be."""
    if quantization is None:
        return report
    failed = next((check for check in report.checks if check.name == QUANTISED and not check.passed), None)
    if failed is None and report.methods.decode != "ragged":
        names = ("decode ragged", "image among text", "video among text")
        failed = next((check for check in report.checks if check.name in names and not check.passed), None)
        failed = failed or ProbeCheck("decode", False, error="its caches cannot share a forward")
    if failed is not None:
        why = f"{failed.name}: {failed.describe()}"
        raise ConfigError(f"cache.kv_bits: {quantization.bits} is not possible for this model: {why}")
    return replace(report, methods=replace(report.methods, quantization=quantization))


def _choose_candidate(template: Sequence[Any], config: Config, paged: bool) -> ComputeMethods:
    """The fastest methods, by the kinds of the model's caches and the config only."""
    scheduler, gpu, snapshots = config.scheduler, uses_gpu(), config.cache.backend != "none"
    batched = _choose_batched(template, config) if paged and gpu else "ragged"
    if config.engine.reproducible:
        # A CPU's BLAS rounds a row by its position among the others: there each row is computed by itself.
        decode: DecodeMethod = batched if gpu and can_batch(template) else "row_by_row"
        width, grid = scheduler.max_running, scheduler.chunk or DEFAULT_CHUNK
        return ComputeMethods(decode, PrefillSharing(), width, uses_cuda(), snapshots, grid=grid)
    if not can_batch(template):
        return ComputeMethods("row_by_row", snapshots=snapshots)
    padded = find_padding_limit(
        template, scheduler.prefill_budget if gpu else scheduler.chunk or DEFAULT_CHUNK
    )
    # CUDA is fast in shapes that it has seen: long prompts are computed by themselves, in chunks of one size.
    shared = SHORT_CHUNK if uses_cuda() else NO_LIMIT
    merged, tails = gpu and not uses_cuda(), can_stack(template)
    sharing = PrefillSharing(scheduler.prefill_rows, padded, merged, tails, shared)
    return ComputeMethods(batched, sharing, launch_first=uses_cuda(), snapshots=snapshots)


def _choose_batched(template: Sequence[Any], config: Config) -> DecodeMethod:
    """How a GPU decodes rows together. A compiled forward cannot change its adapters from step to step."""
    if not config.engine.probe:
        return "ragged"  # whether the kernel is right, and covers the model's heads, has to be compared
    only_keys = {get_kind(layer) for layer in flatten_caches(template)} <= {LayerKind.KV, LayerKind.WINDOW}
    return "compiled" if only_keys and not config.model.adapters else "paged"


class _TextLadder:
    """Goes from the candidate's methods to slower ones where they differ."""

    def __init__(
        self, reference: Reference, candidate: ComputeMethods, quantization: KVQuantization | None
    ) -> None:
        self._reference = reference
        self._quantization = quantization
        self._candidate = candidate
        self._runs = TextChecks(reference, candidate.snapshots)
        self._checks: list[ProbeCheck] = []

    def compare(self) -> tuple[ComputeMethods, list[ProbeCheck]]:
        """The methods that pass, and what was compared."""
        methods = self._candidate
        passed = [self._passes_chunks(size) for size in self._runs.list_chunk_sizes()]
        if not all(passed):
            methods = methods.split_as_library()
        methods = replace(methods, decode=self._choose_decode(methods))
        if methods.decode == "ragged" and self._quantization is not None:
            self._check_quantization(self._quantization)
        methods = replace(methods, sharing=self._choose_sharing(methods.sharing))
        if methods.snapshots:
            without = "prompts are always computed whole: no prefix cache"
            snapshots = self._passes("snapshot", self._runs.restore_snapshots, without)
            methods = replace(methods, snapshots=snapshots)
        return methods, self._checks

    def _passes(self, name: str, run: ProbeRun, instead: str) -> bool:
        check = self._reference.check(name, run)
        self._checks.append(check if check.passed else replace(check, instead=instead))
        return check.passed

    def _passes_chunks(self, size: int) -> bool:
        return self._passes(f"prefill chunks of {size}", partial(self._runs.prefill_chunks, size), IN_CHUNKS)

    def _choose_decode(self, methods: ComputeMethods) -> DecodeMethod:
        if methods.decode != "row_by_row":
            slower = get_args(DecodeMethod)[:-1]
            for method in slower[slower.index("paged" if uses_pages(methods.decode) else methods.decode) :]:
                if not self._passes_decode(method, methods.fixed_width):
                    continue
                may_compile = method == "paged" and methods.decode == "compiled"
                if may_compile and self._passes_decode("compiled", methods.fixed_width):
                    return "compiled"
                return method
        self._runs.forget_copied_row()
        return "row_by_row"

    def _passes_decode(self, method: DecodeMethod, width: int) -> bool:
        run = partial(self._runs.decode, method, width)
        return self._passes(f"decode {method}", run, SLOWER_DECODE[method])

    def _check_quantization(self, quantization: KVQuantization) -> None:
        short = quantization._replace(start=min(quantization.start, PROBED_START))
        run, expected = (partial(f, short) for f in (self._runs.decode_quantised, self._runs.round_rows))
        self._checks.append(self._reference.check(QUANTISED, run, expected))

    def _choose_sharing(self, sharing: PrefillSharing) -> PrefillSharing:
        rows, padded = sharing.max_rows, sharing.max_padded
        alone = "each prompt has its own forward"
        if rows > 1 and not self._passes("prefill equal lengths", self._runs.prefill_equal, alone):
            rows = 1
        equal = "only prompts of equal length share a forward"
        if rows > 1 and padded:
            limit = min([padded, *list_windows(self._reference.make_cache())])
            run = partial(self._runs.prefill_padded, limit)
            padded = padded if self._passes("prefill padded", run, equal) else 0
        tails = rows > 1 and sharing.tails
        if tails:
            run = partial(self._runs.prefill_tails, padded > 0)
            tails = self._passes("prefill tails", run, "what is left of a prompt has its own forward")
        return replace(sharing, max_rows=rows, max_padded=padded, tails=tails)
