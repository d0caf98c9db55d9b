"""Prepares the draft model of sparse prefill, and refuses unsupported models by name."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.load.footprint import count_weight_bytes, measure_footprint
from mlxrun.model.load.loader import SmallModel
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.machine.device import uses_cuda
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from mlxrun.model.run.prefill import LAYERS_PER_LAUNCH
from mlxrun.model.sparse.explicit_positions import PositionCheck, PositionedModelCaller
from mlxrun.model.sparse.prompt_selector import WINDOW, PromptSelector

log = logging.getLogger(__name__)
TRIAL = 2 * WINDOW  # tokens of the prompt that a draft model weighs when it is loaded
# Share of a draft model's layers. The heads that find what a question asks for are not among the last ones:
# without those, what is needed ranks as high, and prompts are read in two thirds of the time.
READ_LAYERS = 2 / 3
_OTHER_CACHES = {
    LayerKind.WINDOW: "has sliding windows",
    LayerKind.OTHER: "has caches of another kind than keys, values and states",
}


@dataclass(frozen=True, slots=True)
class LoadedSelector:
    """`nbytes`: of its weights, unless they are `shared`, and of its caches while it reads the longest
    prompt."""

    selector: PromptSelector
    nbytes: int
    shared: bool = False

    def describe(self) -> str:
        """The memory that it takes, for an error that a user can act on."""
        keys = f"the keys of {self.selector.max_tokens} tokens"
        of = f"{keys} in model.draft" if self.shared else f"model.draft with {keys}"
        return f"{format_rounded(self.nbytes)} of the weights are {of}"


def check_sparse_kind(model_info: LoadedModelInfo) -> None:
    """ConfigError if a model of this kind cannot prefill sparsely with any draft model."""
    if model_info.vision:
        raise _make_error("it is a vision-language model, whose positions are not those of a text")


def make_positioned(caller: ModelCaller) -> PositionedModelCaller:
    """The caller of a model that prefills sparsely. ConfigError if it cannot."""
    problem = _find_cache_problem(caller)
    if problem is not None:
        raise _make_error(f"it {problem}")
    return PositionedModelCaller(caller)


def add_position_check(report: LoadCheckReport, caller: PositionedModelCaller, vocab: int) -> LoadCheckReport:
    """The report with the comparison of rows with gaps. ConfigError if they differ from the library's."""
    checks = PositionCheck(caller, vocab, report.methods).run()
    for check in checks:
        if not check.passed:
            raise _make_error(f"its tokens cannot be computed at given positions: {check.describe()}")
    return replace(report, checks=(*report.checks, *checks))


def make_selector(
    config: Config, model_info: LoadedModelInfo, small: SmallModel, *, shared: bool = False
) -> LoadedSelector:
    """The selector by the draft model `small`, for the target `model_info`. ConfigError if it cannot weigh
    prompts. `shared`: it drafts too, so it needs all its layers."""
    caller, info = small.caller, small.info
    if info.folder.resolve() == model_info.folder.resolve():
        log.warning("model.draft is model.path: sparse prefill reads each long prompt about twice")
    problem = _find_cache_problem(caller)
    if problem is not None:
        raise small.make_error(problem)
    if not shared:
        _cut_layers(caller)
    cache, _ = run_trial_forward(caller)
    limit = min(info.context_length, model_info.context_length - 1)
    layers = LAYERS_PER_LAUNCH if uses_cuda() else 0
    selector = PromptSelector(caller, config.prefill.sparse_keep, limit, layers)
    try:
        selector.start(list(range(2, 2 + TRIAL)))
        while selector.advance(TRIAL // 4) is None:
            pass
    except Exception as error:  # a library may raise anything for what it was not made for
        raise small.make_error(f"cannot weigh tokens: {error}") from error
    mx.clear_cache()
    log.info("%s chooses %g of the tokens of long prompts", info.name, config.prefill.sparse_keep)
    weights = 0 if shared else count_weight_bytes(caller.model)
    tokens = measure_footprint(cache).compute_row_bytes(limit)
    return LoadedSelector(selector, weights + tokens, shared)


def _cut_layers(caller: ModelCaller) -> None:
    """Leave out the last layers, if the model computes without them and some of the others attend."""
    layers = getattr(caller.model, "layers", None)
    if not isinstance(layers, list):
        return
    cut = layers[math.ceil(READ_LAYERS * len(layers)) :]
    del layers[len(layers) - len(cut) :]
    try:
        caches = run_trial_forward(caller)[0]
        is_whole = len(caches) == len(layers) and _find_cache_problem(caller) is None
    except Exception as error:  # a library may raise anything for what it was not made for
        log.debug("all layers of the draft model are used: %s", error)
        is_whole = False
    if not is_whole:
        layers += cut


def _make_error(reason: str) -> ConfigError:
    return ConfigError(f"prefill.sparse: is not possible for this model: {reason}")


def _find_cache_problem(caller: ModelCaller) -> str | None:
    """Why tokens cannot be left out or weighed. Recurrent layers know no positions, so they may be there."""
    kinds = {get_kind(layer) for layer in flatten_caches(caller.make_cache())}
    problem = next((problem for kind, problem in _OTHER_CACHES.items() if kind in kinds), None)
    return problem or (None if LayerKind.KV in kinds else "has no attention")
