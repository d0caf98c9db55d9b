"""Chooses how a model is computed: the fastest methods with the results of the library's own calls.

Each method is compared at load and in `mlxrun doctor`, on a few short prompts. One that differs is replaced
by a slower exact one, and a warning is logged. No model is trusted by its name, since libraries keep having
such bugs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import mlx.core as mx

from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.core.media_names import KINDS
from mlxrun.core.step_plan import DEFAULT_CHUNK
from mlxrun.model.fused.fused_blocks import list_fused
from mlxrun.model.hooks.draft_layout import DraftRecurrence
from mlxrun.model.hooks.even_products import list_even
from mlxrun.model.hooks.quantized_layers import use_row_products
from mlxrun.model.kv.ragged.layer_caches import KEYED, LayerKind, flatten_caches, get_kind
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.attention_checks import AttentionCheck
from mlxrun.model.load_check.image_checks import check_images
from mlxrun.model.load_check.long_reference import LongReference, make_long_reference
from mlxrun.model.load_check.product_checks import PRODUCTS_CHECK, check_products, forget_products
from mlxrun.model.load_check.reference import REDUCED, CheckRun, Reference, list_windows
from mlxrun.model.load_check.report import ComparedWindow, LoadCheck, LoadCheckReport
from mlxrun.model.load_check.rounding import CheckLogits
from mlxrun.model.load_check.text_checks import DraftCheck, TextChecks
from mlxrun.model.load_check.text_ladder import QUANTIZED, SLOWER_DECODE, TextLadder
from mlxrun.model.machine.device import read_active, read_peak, uses_cuda, uses_gpu
from mlxrun.model.run.chunk_grouping import NO_LIMIT, PrefillSharing
from mlxrun.model.run.compute_methods import (
    ComputeMethods,
    DecodeMethod,
    can_batch,
    can_stack,
    find_padding_limit,
    is_compiled,
    uses_pages,
)
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller

SHORT_CHUNK = 1024  # tokens of chunks that share a forward on CUDA: those take the time of launching it
COMPANIES = (7, 31)  # rows beside one that must have the bits that it has alone
WIDTHS = (1, 3, 7, 15, 23, 31)  # the same where forwards of these and some other widths are computed
# Rows of a decode forward on a CPU, whatever `scheduler.max_running` is: as many as BLAS rounds alike in
# every place. Kernels for AVX2 round some of 12 and more rows otherwise. Fewer rows may have the same bits.
CPU_WIDTHS, NARROW_WIDTHS = (32, 8), (1, 2, 4, 8, 16)


def choose_methods(
    caller: ModelCaller,
    vocab: int,
    config: Config,
    model_info: LoadedModelInfo | None = None,
    quantization: KVQuantization | None = None,
) -> LoadCheckReport:
    """The fastest methods that this model passes; with `engine.load_check` off, the fastest possible ones.
    `model_info`: has the processor of images, without which they are not compared. ModelLoadError if no
    method matches the library; ConfigError if rows cannot be quantized as configured."""
    started, before = time.perf_counter(), read_active()
    template = caller.make_cache()
    candidate = _choose_candidate(template, config, quantization is None, bool(list_fused(caller.model)))
    if caller.whole_prompts:
        candidate = replace(candidate.split_as_library(), whole_prompts=True, sharing=PrefillSharing())
    if not config.engine.load_check:
        return _add_quantization(LoadCheckReport(candidate, (), caller.weights), quantization)
    products = check_products(caller.model)
    # In half precision, products round each row by itself meanwhile; in float32 they need not, and on a CPU
    # that takes thrice as long.
    rounds = uses_gpu() or config.model.dtype not in ("auto", "float32")
    with use_row_products(caller.model) if rounds else nullcontext():
        reference = Reference(caller, vocab, attention_check=AttentionCheck())
        context = None if model_info is None else model_info.context_length
        made = make_long_reference(reference, vocab, context)
        long, without = (None, made) if isinstance(made, str) else (made, "")
        ladder = TextLadder(reference, long, candidate, quantization)
        methods = ladder.compare()
        windows = tuple(_describe_window(size, long) for size in list_windows(template))
        found = LoadCheckReport(methods, (*products, *ladder.checks), caller.weights, windows, without)
        if isinstance(caller, VisionModelCaller):
            found = check_images(caller, vocab, model_info, found)
    in_one_forward = uses_pages(found.methods.decode) or found.methods.decode == "ragged"
    if found.methods.fixed_width > 1 and in_one_forward:
        found = _check_company(caller, found, reference)
    if caller.row_adapters.names or found.methods.decode == "row_by_row" != methods.decode:
        done = len(ladder.checks)
        ladder.require_rows(found.methods)
        found = found.add(ladder.checks[done:])
    if config.speculation.method != "off" and uses_pages(found.methods.decode):
        found = _check_drafts(found, reference)
    found.log_failures()
    found = _add_quantization(found, quantization)
    peak = max(read_peak() - before, 0)
    return replace(found, seconds=time.perf_counter() - started, compared=time.time(), peak=peak)


def follow_report(caller: ModelCaller, report: LoadCheckReport) -> LoadCheckReport:
    """Do to a model what `choose_methods` did to it for this report, with another caller or at an earlier
    start. Returns the report with the caller's weights."""
    if isinstance(caller, VisionModelCaller):
        caller.follow(report.refused, report.features_cached, report.separate)
    if any(check.name == PRODUCTS_CHECK and not check.passed for check in report.checks):
        forget_products(caller.model)
    report.log_failures()
    return replace(report, weights=caller.weights)


def _describe_window(size: int, long: LongReference | None) -> ComparedWindow:
    crossed = long is not None and size <= len(long.prompts[0])
    return ComparedWindow(size, size if crossed else min(size, REDUCED))


def _check_company(caller: ModelCaller, report: LoadCheckReport, reference: Reference) -> LoadCheckReport:
    """The report with whether a row has the same bits in any company, by the products that steps have. It is
    computed in forwards of any width, if not so in those of a fixed width, and else in one of its own."""
    if not uses_gpu():
        report = _choose_width(report, reference)
    methods = report.methods
    if methods.decode == "row_by_row":
        return report
    if list_even(caller.model) and is_compiled(methods.decode):
        tried = replace(methods, any_width=True)
        check = _compare_company(tried, reference, WIDTHS, "forwards of one width")
        report = report.add([check], methods=tried if check.passed else methods)
        if check.passed:
            return report
    check = _compare_company(methods, reference, COMPANIES, SLOWER_DECODE["grouped"])
    return report.add([check], methods=methods if check.passed else replace(methods, decode="row_by_row"))


def _compare_company(
    methods: ComputeMethods, reference: Reference, companies: Sequence[int], instead: str
) -> LoadCheck:
    runs = TextChecks(reference, False)
    alone, beside = (partial(runs.decode_beside, methods, some) for some in ((0,), companies))

    def decode_single_row() -> CheckLogits:
        own = _run_by_engine(reference, alone)
        return {(i, step): own[0, step] for i in range(len(companies)) for _, step in own}

    name = f"same bits in {'any width' if methods.any_width else 'company'}"
    return reference.check(name, beside, decode_single_row, exact=True, instead=instead)


def _choose_width(report: LoadCheckReport, reference: Reference) -> LoadCheckReport:
    """The report with the widest forward on a CPU that gives a row the same bits in every place, and with the
    narrower ones that give these bits too. If there is none, each row has its own forward."""
    runs, instead = TextChecks(reference, False), SLOWER_DECODE["grouped"]

    def check_places(methods: ComputeMethods, alone: mx.array) -> LoadCheck:
        expected = {(place, 0): alone for place in range(methods.fixed_width)}
        name, run = "same bits in every place", partial(runs.decode_copies, methods)
        return reference.check(name, run, lambda: expected, exact=True, instead=instead)

    for width in CPU_WIDTHS:
        methods = replace(report.methods, fixed_width=width)
        alone = _run_by_engine(reference, partial(runs.decode_beside, methods, (0,)))[0, 0]
        check = check_places(methods, alone)
        if check.passed:
            less = [replace(methods, fixed_width=size) for size in NARROW_WIDTHS if size < width]
            narrow = tuple(each.fixed_width for each in less if check_places(each, alone).passed)
            return report.add([check], methods=replace(methods, narrow_widths=narrow))
    return report.add([check], methods=replace(report.methods, decode="row_by_row"))


def _check_drafts(report: LoadCheckReport, reference: Reference) -> LoadCheckReport:
    """The report with how drafts are computed. Where steps must round alike, no bit may differ, with the
    products that steps have; few rows a call cost less, and may round otherwise."""
    methods, fixed = report.methods, report.methods.fixed_width > 0
    states = LayerKind.STATE in map(get_kind, flatten_caches(reference.make_cache()))
    for recurrence in get_args(DraftRecurrence)[: 2 + fixed if states else 1]:
        methods = replace(methods, recurrence=recurrence)
        runs = DraftCheck(reference, methods)
        expected = partial(_run_by_engine, reference, runs.take_steps) if fixed else None
        name = f"drafts in {recurrence.replace('_', ' ')}" if states else "drafts"
        with nullcontext() if fixed else use_row_products(reference.caller.model):
            check = reference.check(
                name, runs.take_drafts, expected, exact=fixed, instead="nothing is drafted"
            )
        if check.passed:
            return report.add([check], methods=methods)
    problem = f"rows with drafts are not computed as by steps: {check.describe()}"
    return report.add([check], methods=replace(methods, draft_problem=problem))


def _run_by_engine(reference: Reference, run: CheckRun) -> CheckLogits:
    with reference.caller.use_attention():
        return run()


def _add_quantization(report: LoadCheckReport, quantization: KVQuantization | None) -> LoadCheckReport:
    """The report with quantized rows. ConfigError if this model's rows cannot be."""
    if quantization is None:
        return report
    bad = {check.name: check for check in report.checks if not check.passed}
    failed = bad.get(QUANTIZED)
    if failed is None and report.methods.decode != "ragged":
        names = ("decode ragged", *(f"{kind} among text" for kind in KINDS))
        unknown = LoadCheck("decode", False, error="its caches cannot share a forward")
        failed = next((bad[name] for name in names if name in bad), unknown)
    if failed is not None:
        why = f"{failed.name}: {failed.describe()}"
        raise ConfigError(f"cache.kv_bits: {quantization.bits} is not possible for this model: {why}")
    return replace(report, methods=replace(report.methods, quantization=quantization))


def _choose_candidate(template: Sequence[Any], config: Config, paged: bool, fused: bool) -> ComputeMethods:
    """The fastest methods, by the kinds of the model's caches and layers, and by the config only."""
    scheduler, gpu, snapshots = config.scheduler, uses_gpu(), config.cache.backend != "none"
    batched = _choose_batched(template, config, fused) if paged and gpu else "ragged"
    # Prompts wait for launches on CUDA. On Apple's GPUs nobody has measured. In reproducible mode, bytes were
    # compared on a GPU with prompts by the library's layers (benchmarks/reproduce).
    fused_prompts = uses_cuda() and fused and not config.engine.reproducible
    make = partial(ComputeMethods, launch_first=uses_cuda(), snapshots=snapshots, fused_prompts=fused_prompts)
    if config.engine.reproducible:
        # A CPU's BLAS may round a row by its place among the others, which has to be compared.
        possible = can_batch(template) and (gpu or config.engine.load_check)
        decode: DecodeMethod = batched if possible else "row_by_row"
        width, grid = scheduler.max_running if gpu else CPU_WIDTHS[0], scheduler.chunk or DEFAULT_CHUNK
        return make(decode, fixed_width=width, grid=grid)
    if not can_batch(template):
        return make("row_by_row")
    padded = find_padding_limit(
        template, scheduler.prefill_budget if gpu else scheduler.chunk or DEFAULT_CHUNK
    )
    # CUDA is fast in shapes that it has seen: long prompts are computed by themselves, in chunks of one size.
    shared = SHORT_CHUNK if uses_cuda() else NO_LIMIT
    merged, tails = gpu and not uses_cuda(), can_stack(template)
    sharing = PrefillSharing(scheduler.prefill_rows, padded, merged, tails, shared)
    return make(batched, sharing)


def _choose_batched(template: Sequence[Any], config: Config, fused: bool) -> DecodeMethod:
    """How a GPU decodes rows together. A compiled forward cannot change its adapters from step to step."""
    if not config.engine.load_check:
        return "ragged"  # whether the kernel is right, and covers the model's heads, has to be compared
    only_keys = {get_kind(layer) for layer in flatten_caches(template)} <= KEYED
    if not only_keys or config.model.adapters:
        return "paged"
    return "fused" if fused else "compiled"
