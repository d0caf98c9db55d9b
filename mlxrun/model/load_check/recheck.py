"""Repeats the load check of a model whose verdict was kept, while the engine is idle.

It works on a copy of the model's caller, and stops between two forwards once a request comes. All that the
checks change of the model meanwhile returns with that. A method that passed and now differs is compared once
more. If it differs again, that is a surprise: the verdict is dropped, and the report says what was found.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlxrun.model.hooks.quantized_layers import keep_methods
from mlxrun.model.load_check.kept_verdicts import KeptVerdict, VerdictFile
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.machine.device import get_memory_limit, read_active, uses_gpu
from mlxrun.model.run.model_caller import ModelCaller

log = logging.getLogger(__name__)
IDLE_SECONDS = 10.0  # of an engine, before it compares again
MOST_IDLE_SECONDS = 600.0  # the same after many interruptions, each of which doubles it
Compare = Callable[[ModelCaller], LoadCheckReport]


class CheckInterrupted(BaseException):
    """The comparison is given up. No `except Exception` of a check takes this for a difference."""


class Recheck:
    """The comparison that is still to be done. `compare`: the load check of a caller; `delay`: seconds for
    which the engine is idle before the next attempt; `limit`: the config's bytes of memory."""

    def __init__(
        self,
        caller: ModelCaller,
        compare: Compare,
        verdict: KeptVerdict,
        file: VerdictFile,
        limit: int | None = None,
    ) -> None:
        self._caller, self._compare = caller, compare
        self._verdict, self._file = verdict, file
        self._limit = limit
        self.delay = IDLE_SECONDS

    def run(self, is_wanted: Callable[[], bool]) -> LoadCheckReport | None:
        """The report of the comparison, for the methods that were kept; None if it was interrupted.
        `is_wanted`: whether the engine has something else to do."""
        report = self._verdict.report
        limit = get_memory_limit(self._limit)
        if is_wanted() or (limit and read_active() + report.peak > limit):
            self._postpone()
            return None
        try:
            found = self._repeat(is_wanted)
            if isinstance(found, str):
                self._file.remove()
                found = self._repeat(is_wanted)
        except CheckInterrupted:
            self._postpone()
            return None
        if isinstance(found, str):
            log.error("load check: the kept verdict of this model is wrong: %s; start again", found)
            return replace(report, surprise=found)
        self._file.write(replace(self._verdict, report=found))
        if found.methods != report.methods:
            log.warning("load check: faster methods pass now, which the next start will use")
            return report
        return found

    def _postpone(self) -> None:
        self.delay = min(2 * self.delay, MOST_IDLE_SECONDS)

    def _repeat(self, is_wanted: Callable[[], bool]) -> LoadCheckReport | str:
        """The report, or what differs though it passed."""
        try:
            with keep_methods(self._caller.model):
                found = self._compare(_copy_caller(self._caller, is_wanted))
        except Exception as error:  # the model is refused now, or a library fails
            return f"{type(error).__name__}: {error}"
        return find_surprise(self._verdict.report, found) or found


def find_surprise(kept: LoadCheckReport, found: LoadCheckReport) -> str:
    """What passed in one report and failed in a later one; empty if nothing."""
    passed = {check.name for check in kept.checks if check.passed}
    failed = [check for check in found.checks if not check.passed and check.name in passed]
    texts = [f"{check.name}: {check.describe()}" for check in failed]
    refused = [(kind, why) for kind, why in found.refused.items() if why and not kept.refused.get(kind)]
    texts += [f"{kind} are refused: {why}" for kind, why in refused]
    return "; ".join(texts)


def _copy_caller(caller: ModelCaller, is_wanted: Callable[[], bool]) -> ModelCaller:
    """A caller of the same model with its own state, which raises CheckInterrupted instead of computing once
    something else is wanted."""
    copied: Any = copy.copy(caller)
    copied.attention, copied.fused_prompts = ModelCaller.attention, ModelCaller.fused_prompts
    if hasattr(copied, "refused"):
        copied.refused = dict(copied.refused)
        copied.reset_images()
    # A compiled forward must not be given up while it is traced.
    names = ("call_library", "prefill", "use_attention") if uses_gpu() else _EVERY
    for name in names:
        setattr(copied, name, _make_interruptible(getattr(copied, name), is_wanted))
    made: ModelCaller = copied
    return made


_EVERY = ("call_library", "prefill", "use_attention", "decode")


def _make_interruptible(call: Callable[..., Any], is_wanted: Callable[[], bool]) -> Callable[..., Any]:
    def call_unless_wanted(*given: Any, **more: Any) -> Any:
        if is_wanted():
            raise CheckInterrupted
        return call(*given, **more)

    return call_unless_wanted
