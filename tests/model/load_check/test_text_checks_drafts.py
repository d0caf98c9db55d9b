"""The load check of drafts finds each planted bug, and says for each family whether its rows can draft."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from benchmarks.sweep.sweep import list_families
from benchmarks.tiny.random_models import read_vision_info, write_text_model, write_vision_model
from mlxrun.config.settings import Config, SpeculationSettings
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check import choose
from mlxrun.model.load_check.reference import Reference
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.load_check.text_checks import DraftCheck
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from mlxrun.model.speculation.build import find_draft_problem
from tests.helpers import drafted_state_bugs
from tests.helpers.engine_driver import make_config
from tests.helpers.family_refusals import skip_expected_refusal
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo

Patch = pytest.MonkeyPatch
HYBRIDS = ("qwen3_next", "nemotron_h", "lfm2", "mamba2")
# What reads the state of its convolution beside its keys, as the problem names it.
CANNOT = {"baichuan_m1": "Attention", "zaya1_vl": "CCA"}


@pytest.fixture(autouse=True)
def pages_on_a_cpu(monkeypatch: Patch) -> None:
    """The methods of a GPU are the candidates; attention over pages is gathered."""
    monkeypatch.setattr(choose, "uses_gpu", lambda: True)


def probe_drafts(folder: Path, reproducible: bool = True) -> LoadCheckReport:
    return probe_model(folder, speculation=SpeculationSettings("auto"), reproducible=reproducible)


def keep_rejected_keys(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PagedDecodeBatch, "accept", lambda self, lengths: None)


@pytest.mark.parametrize(
    ("family", "reproducible"), [("gemma3_text", True), *itertools.product(HYBRIDS, (False, True))]
)
def test_rows_may_draft(zoo: Zoo, family: str, reproducible: bool) -> None:
    report = probe_drafts(zoo.text(family), reproducible)
    check = next(check for check in report.checks if check.name.startswith("drafts"))
    assert check.passed and (check.difference == 0.0) >= reproducible
    assert find_draft_problem(report.methods) is None
    # A prompt of Mamba-2 rounds otherwise than its tokens one by one.
    slower = reproducible and family in ("nemotron_h", "mamba2")
    assert report.methods.recurrence == ("passes" if slower else "blocks")


@pytest.mark.parametrize("plant", drafted_state_bugs.PLANTS)
@pytest.mark.parametrize(
    ("family", "reproducible"), [("qwen3_next", False), ("qwen3_next", True), ("nemotron_h", True)]
)
def test_planted_bugs_are_found(
    zoo: Zoo, monkeypatch: Patch, family: str, plant: Callable[[Patch], None], reproducible: bool
) -> None:
    plant(monkeypatch)
    report = probe_drafts(zoo.text(family), reproducible)
    assert list_failed(report) == ["drafts in wide passes" if reproducible else "drafts in passes"]
    assert "not computed as by steps" in str(find_draft_problem(report.methods))


def test_rejected_keys_are_found(zoo: Zoo, monkeypatch: Patch) -> None:
    keep_rejected_keys(monkeypatch)
    assert list_failed(probe_drafts(zoo.text("llama"))) == ["drafts"]


@pytest.mark.parametrize("axis", [0, 1])
def test_what_rounds_otherwise_is_computed_as_by_steps(zoo: Zoo, monkeypatch: Patch, axis: int) -> None:
    """A layer whose last bits depend on the number of rows (0), or of tokens in a row (1)."""
    original = Qwen3NextGatedDeltaNet.__call__

    def call(self: nn.Module, inputs: mx.array, mask: object = None, cache: object = None) -> mx.array:
        result: mx.array = original(self, inputs, mask, cache)
        return result * (1 + 1e-6 * inputs.shape[axis])

    monkeypatch.setattr(Qwen3NextGatedDeltaNet, "__call__", call)
    report = probe_drafts(zoo.text("qwen3_next"))
    assert list_failed(report) == [] and report.methods.recurrence == ("wide_passes", "passes")[axis]
    assert probe_drafts(zoo.text("qwen3_next"), reproducible=False).methods.recurrence == "blocks"
    monkeypatch.setattr(choose, "get_args", lambda kind: [x for x in get_args(kind) if "passes" not in x])
    assert list_failed(probe_drafts(zoo.text("qwen3_next"))) == ["drafts in blocks"]


@pytest.mark.parametrize("reproducible", [False, True])
def test_bits_are_compared_with_the_products_of_steps(
    zoo: Zoo, monkeypatch: Patch, reproducible: bool
) -> None:
    """The library's products round a row by itself; those of a quantized model's steps go by their number."""
    found = []

    @contextmanager
    def use_row_products(model: nn.Module) -> Iterator[None]:
        found.append("library")
        yield
        found.append("own")

    def take_drafts(self: DraftCheck) -> object:
        found.append("drafts")
        return original(self)

    original = DraftCheck.take_drafts
    monkeypatch.setattr(choose, "use_row_products", use_row_products)
    monkeypatch.setattr(DraftCheck, "take_drafts", take_drafts)
    probe_drafts(zoo.text("lfm2"), reproducible)
    assert found[found.index("drafts") - 1] == ("own" if reproducible else "library")


def test_all_forwards_of_a_fixed_width_are_as_wide(zoo: Zoo, monkeypatch: Patch) -> None:
    """Also where a step has fewer rows than the drafts that are compared."""
    config = resolve_config(make_config(zoo.text("llama")))
    caller = load_caller(config, load_model_info(config.model, weights=True))
    widths, original = set(), PagedDecodeBatch.compute_logits

    def compute(self: PagedDecodeBatch, tokens: mx.array, *more: Any) -> Any:
        widths.add(tokens.shape[0])
        return original(self, tokens, *more)

    monkeypatch.setattr(PagedDecodeBatch, "compute_logits", compute)
    check = DraftCheck(Reference(caller, 259), ComputeMethods("paged", fixed_width=2))
    assert check.take_steps().keys() == check.take_drafts().keys() and len(widths) == 1


def test_nothing_is_compared_where_nothing_drafts(zoo: Zoo) -> None:
    report = probe_model(zoo.text("qwen3_next"), reproducible=True)
    assert not any(check.name.startswith("drafts") for check in report.checks)


def load_family(kind: str, family: str, folder: Path) -> tuple[ModelCaller, Config]:
    """A tiny model of a family; images are not compared."""
    (write_text_model if kind == "text" else write_vision_model)(family, folder)
    config = resolve_config(make_config(folder, speculation=SpeculationSettings("auto"), reproducible=True))
    is_text = kind == "text"
    info = load_model_info(config.model, weights=True) if is_text else read_vision_info(family, folder)
    return load_caller(config, info), config


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "family"), list_families())
def test_every_family_with_recurrent_states_drafts(tmp_path: Path, kind: str, family: str) -> None:
    """Wherever rows decode by pages at all, all but the named families draft."""
    with skip_expected_refusal(kind, family):
        caller, config = load_family(kind, family, tmp_path / "model")
    if LayerKind.STATE not in map(get_kind, flatten_caches(caller.make_cache())):
        pytest.skip("no recurrent states")  # a forward of some of the others ends the process
    _, vocab = run_trial_forward(caller)
    methods = choose.choose_methods(caller, vocab, config).methods
    if methods.decode != "paged":
        pytest.skip(f"decodes {methods.decode}")
    problem = methods.draft_problem
    assert bool(problem) == (family in CANNOT), problem
    assert not problem or CANNOT[family] in problem, "the problem names what reads the state"
