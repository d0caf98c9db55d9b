"""The checks of media: prompts as the engine computes them, and by the library's own call."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlxrun.core.errors import MediaError
from mlxrun.core.media_names import MEDIA_PAIRS, PLURALS, MediaKind, name_pair
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.media_prompts import (
    compare_arrays,
    embed_by_library,
    find_kept_arrays,
    list_media_prompts,
    make_mixed_prompt,
    make_pair,
    measure_neighbours,
    measure_repetition,
)
from mlxrun.model.load_check.reference import LENGTHS, Reference, copy_cache
from mlxrun.model.load_check.report import LoadCheck, LoadCheckReport, run_check
from mlxrun.model.load_check.rounding import CheckLogits, LogitDifference
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.model_caller import VisionModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs, make_arrays

log = logging.getLogger(__name__)

IMAGE_STEPS = 1  # tokens decoded after the prompt
MIX_TOLERANCE = 1e-2  # of features, in standard deviations: rounding by other neighbours in a product
Split = Literal["chunks", "prefix", "whole"]


def check_images(
    caller: VisionModelCaller, vocab: int, info: LoadedModelInfo | None, text: LoadCheckReport
) -> LoadCheckReport:
    """The report of the text checks, extended by those of images, and of videos and audio if the model takes
    them. From now on, the caller refuses media that cannot be computed exactly."""
    found, cached = _MediaLadder(caller, vocab, info, "image").compare(text, True)
    kinds: list[MediaKind] = [] if found.images else ["image"]
    for kind in [] if info is None else info.list_sampled():
        found, cached = _MediaLadder(caller, vocab, info, kind).compare(found, cached)
        if not getattr(found, PLURALS[kind]):
            kinds.append(kind)
    pairs = [pair for pair in MEDIA_PAIRS if set(pair) <= set(kinds)]
    if found.methods.whole_media or found.methods.library_chunks:
        for pair in [pair for pair in pairs if "audio" in pair and pair[0] != "audio"]:
            # Their image tokens see each other. Beside audio, mlx-vlm splits the prompts of some so that they
            # do not, and features do not show it.
            caller.refused[name_pair(*pair)] = "the library splits such prompts otherwise than each alone"
            pairs.remove(pair)
    mixes = [_compare_mix(caller, info, pair) for pair in pairs if info is not None]
    caller.reset_images(cached, found.separate)
    return replace(found.add(mixes), refused=dict(caller.refused), features_cached=cached)


def _compare_mix(
    caller: VisionModelCaller, info: LoadedModelInfo, pair: tuple[MediaKind, MediaKind]
) -> LoadCheck:
    """The check of two media in one prompt: the library must give each the features that it has alone. Unless
    it does, the caller refuses such prompts."""

    def compare() -> LogitDifference:
        made = make_mixed_prompt(info, pair)
        return LogitDifference(measure_neighbours(caller.embedder, made), MIX_TOLERANCE)

    name = name_pair(*pair)
    check = run_check(" beside ".join(pair), compare, MIX_TOLERANCE, f"prompts with {name} are refused")
    caller.refused[name] = (
        "" if check.passed else f"the library computes them together otherwise than alone: {check.describe()}"
    )
    return check


@dataclass(frozen=True, slots=True)
class _MediaLadder:
    """The checks of one kind of media alone. It goes to slower ways where the engine's differ, and
    refuses them if none is left."""

    caller: VisionModelCaller
    vocab: int
    info: LoadedModelInfo | None
    kind: MediaKind

    def compare(self, report: LoadCheckReport, cached: bool) -> tuple[LoadCheckReport, bool]:
        """The report with these checks, and whether features are cached. `cached`: whether they may be."""
        plural, refused = PLURALS[self.kind], self.caller.refused
        if refused[plural]:  # whatever they would show
            return self._add_note(report, f"refused: {refused[plural]}"), cached
        try:
            if self.info is None:
                raise MediaError("there is no image processor")
            checks = self._make_checks(list_media_prompts(self.info, self.kind))
        except MediaError as error:
            if self.kind == "audio":  # of which not all processors are known
                refused[plural] = f"not compared: {error}"
            log.warning("load check: %s are not compared for this model: %s", plural, error)
            return self._add_note(report, f"not compared: {error}"), cached
        methods = report.methods
        if checks.measure(f"{self.kind} again", checks.measure_repetition, f"{plural} are refused"):
            separate = self._find_separate(checks)
            methods, cached = self._choose(checks, methods, cached, separate)
            report = replace(report, separate=(*report.separate, *separate))
        else:
            why = checks.done[-1].describe()
            refused[plural] = f"the library does not compute {plural} alike each time: {why}"
        report = report.add(checks.done, methods=methods)
        return self._add_note(report, f"refused: {refused[plural]}" if refused[plural] else ""), cached

    def _make_checks(self, prompts: Sequence[ProcessedPrompt]) -> ImageChecks:
        """The checks of the first of these prompts that the library computes. MediaError with its last error
        if it computes none. Some models take one image only."""
        failed: Exception | None = None
        for prompt in prompts:
            try:
                reference = Reference(self.caller, self.vocab, LENGTHS[:1], reduced=False)
                return ImageChecks(self.caller, prompt, reference)
            except Exception as error:  # a library may raise anything: there is nothing to compare with
                failed = error
        raise MediaError(f"the library's own call fails: {type(failed).__name__}: {failed}") from failed

    def _find_separate(self, checks: ImageChecks) -> tuple[MediaKind, ...]:
        """This kind, if each of two images has the features that it has alone, so that they are encoded one
        by one. Never audio, which may depend on the lengths."""
        if self.info is None or self.kind == "audio":
            return ()
        try:
            difference = measure_neighbours(self.caller.embedder, make_pair(self.info, self.kind))
        except Exception as error:  # two images cannot be told apart, or the library's code fails with them
            log.info("load check: %ss of a prompt are encoded by one call: %s", self.kind, error)
            return ()
        instead = f"one call encodes all {self.kind}s of a prompt"
        return (self.kind,) if checks.measure(f"{self.kind} alone", lambda: difference, instead) else ()

    def _add_note(self, report: LoadCheckReport, note: str) -> LoadCheckReport:
        return report.add([], **{PLURALS[self.kind]: note})

    def _choose(
        self, checks: ImageChecks, methods: ComputeMethods, cached: bool, separate: tuple[MediaKind, ...]
    ) -> tuple[ComputeMethods, bool]:
        """The methods that pass, and whether features are cached. `cached`: whether they may be; `separate`:
        this kind, if images are encoded one by one."""
        kind, caller, wanted = self.kind, self.caller, cached
        plural = PLURALS[kind]
        by_call = f"all {plural} of a prompt are encoded by one call, each time"
        # What is done in place of each split of a prompt that is encoded by one call.
        slower = {
            "chunks": f"a prompt with {plural} is computed at once up to the last of them",
            "prefix": "prompts are split as the library splits them, without a prefix cache",
            "whole": f"{plural} are refused",
        }

        def passes(split: Split, name: str = "") -> bool:
            return checks.check(f"{kind} {name or split}", partial(checks.prefill, split), slower[split])

        def features_pass() -> bool:
            return checks.measure(f"{kind} features", checks.measure_features, by_call)

        caller.reset_images(cached, separate)
        split: Split = "whole" if methods.whole_prompts else "chunks"
        cached = cached and checks.check(f"{kind} {split}", partial(checks.prefill, split), by_call)
        cached = cached and features_pass()
        caller.reset_images(cached, separate)
        if not cached and not passes(split, f"{split}, encoded by one call"):
            if not methods.whole_prompts and passes("prefix"):
                methods = replace(methods, whole_media=True)
                caller.reset_images(wanted, separate)
                cached = wanted and features_pass()
            elif not methods.whole_prompts and passes("whole"):
                methods = methods.split_as_library()
            else:
                why = checks.done[-1].describe()
                own = why.partition(" are refused for this model: ")[2]  # by the embedder
                caller.refused[plural] = own or f"they are computed differently from the library: {why}"
                return methods, cached
        if methods.decode != "row_by_row" and checks.can_join:
            run = partial(checks.decode_among_text, methods)
            if not checks.check(f"{kind} among text", run, "one forward for each row"):
                methods = replace(methods, decode="row_by_row")
        return methods, cached


class ImageChecks:
    """Computes one prompt with images by several methods. The reference's only prompt is the text beside it:
    its logits have index 0, those of the prompt with images index 1."""

    def __init__(self, caller: VisionModelCaller, prompt: ProcessedPrompt, reference: Reference) -> None:
        self.caller = caller
        self.done: list[LoadCheck] = []
        self._prompt = prompt
        self._reference = reference
        self._last = len(prompt.ids) - (not caller.whole_prompts)  # tokens that no decode step computes
        spans = [range(*span) for span in prompt.image_spans]
        text = [token for i, token in enumerate(prompt.ids) if not any(i in span for span in spans)]
        self._answer = text[-IMAGE_STEPS:]
        self._prefilled: tuple[PromptInputs, list[Any]] | None = None
        self._own_arrays = find_kept_arrays(caller.model)
        self._features = self.call_library(reference)

    def call_library(self, reference: Reference) -> dict[str, Any]:
        """Add the logits of the library's own calls to the reference; return what it made of the prompt."""
        made: list[dict[str, Any]] = []

        def compute() -> CheckLogits:
            made.append(embed_by_library(self.caller.model, self._prompt.ids, self._prompt.media))
            return self._compute_by_library(made[-1])

        reference.add_logits(compute)
        return made[0]

    def _compute_by_library(self, features: dict[str, Any]) -> CheckLogits:
        """The logits of the prompt's answer, from what the library made of the prompt."""
        model, ids = self.caller.model, mx.array([self._prompt.ids])
        given = make_arrays(self._prompt.media)
        given.pop("pixel_values", None)
        cache = self.caller.make_cache()
        copied = {name: a[...] if isinstance(a, mx.array) else a for name, a in features.items()}
        outputs = [model.language_model(ids, cache=cache, **(given | copied)).logits]  # may write into them
        mx.eval(outputs, list_all_arrays(cache))
        for token in self._answer:
            outputs.append(model.language_model(mx.array([[token]]), cache=cache).logits)
        return {(1, step): logits[0, -1] for step, logits in enumerate(outputs)}

    def check(self, name: str, run: Callable[[], CheckLogits], instead: str) -> bool:
        """Compare the result of a run, and record it. Returns whether it passed."""
        self.done.append(self._reference.check(name, run, instead=instead))
        return self.done[-1].passed

    def measure(self, name: str, compute: Callable[[], float], instead: str) -> bool:
        """Whether a difference of embeddings is rounding. The result is recorded."""
        limit = self._reference.tolerance
        self.done.append(run_check(name, lambda: LogitDifference(compute(), limit), limit, instead))
        return self.done[-1].passed

    def prefill(self, split: Split) -> CheckLogits:
        """Logits of the prompt, by `split`. `chunks` end before and after images, as the scheduler splits it;
        `prefix`: at once up to the last image; `whole`: all at once."""
        spans = self._prompt.image_spans
        inner = {"chunks": {*spans[0], spans[-1][1]}, "prefix": {spans[-1][1]}, "whole": set[int]()}[split]
        edges = sorted(edge for edge in {0, self._last, *inner} if edge <= self._last)
        ids, cache = self._prompt.ids, self.caller.make_cache()
        inputs = self.caller.prepare_inputs(ids, self._prompt.media)
        for start, stop in itertools.pairwise(edges):
            inputs = self.caller.encode_images(inputs, stop)
            logits = self.caller.prefill(mx.array([ids[start:stop]]), cache, start, inputs)
            mx.eval(list_all_arrays(cache))
        copied = copy_cache(cache)
        self._prefilled = None if copied is None else (inputs, copied)
        found: CheckLogits = {(1, 0): logits[0, -1]} if self._last == len(ids) else {}
        for at, token in enumerate(self._tokens):
            position = self._last + at + inputs.position_delta
            found[1, len(found)] = self.caller.decode(mx.array([[token]]), cache, [position])[0, -1]
        return found

    @property
    def _tokens(self) -> list[int]:
        """What is decoded after the prompt's caches."""
        return [*self._prompt.ids[self._last :], *self._answer]

    def measure_repetition(self) -> float:
        """How far the library's embeddings of the prompt are from its earlier ones."""
        return measure_repetition(self.caller.embedder, self._prompt, self._features, self._own_arrays)

    def measure_features(self) -> float:
        """The largest difference of a prompt that is made of cached features, in standard deviations of the
        library's embeddings. ValueError if positions differ from those that come with the library's
        embeddings. The logits of the prompt's chunks show positions that its language model computes."""
        ids, media = self._prompt.ids, self._prompt.media
        inputs = self.caller.prepare_inputs(ids, media)
        inputs = self.caller.encode_images(inputs, len(ids))
        rest = self.caller.prepare_inputs(ids, media, cached=self._last)
        delta, positions = (self._features.get(name) for name in ("rope_deltas", "position_ids"))
        expected = inputs.position_delta if delta is None else int(delta.item())
        if {inputs.position_delta, rest.position_delta} != {expected}:
            raise ValueError(f"positions after the images are off by other than {expected}")
        known = positions is not None and inputs.positions is not None
        if known and not mx.all(inputs.positions == positions).item():  # of audio, those of one axis
            raise ValueError("positions inside the prompt differ")
        names = ("inputs_embeds", "per_layer_inputs")
        own = [self._features[name] for name in names if name in self._features]
        mask = self._features.get("visual_pos_masks")
        shown = None if mask is None else np.array(mask).reshape(-1)[: len(ids)]
        deepstack = self._features.get("deepstack_visual_embeds")
        own += self.caller.embedder.read_deepstack(deepstack, shown)
        found = [a for a in (inputs.embeds, inputs.per_layer, *inputs.deepstack) if a is not None]
        return max(compare_arrays(a, b) for a, b in zip(found, own, strict=True))

    @property
    def can_join(self) -> bool:
        """Whether the prompt's caches are available."""
        return self._prefilled is not None

    def decode_among_text(self, methods: ComputeMethods) -> CheckLogits:
        """Logits of the prompt with images and the text beside it in one batch."""
        assert self._prefilled is not None
        inputs, cache = self._prefilled
        batch = make_decode_batch(self.caller.make_cache(), methods)
        batch.update({"0", "1"}, [self._reference.make_row(0), JoiningRow("1", self._last, cache)])
        self._prefilled = None  # the batch writes into it
        tokens = (self._reference.inputs[0], self._tokens)
        first = (0, IMAGE_STEPS + 1 - len(self._tokens))  # the step of each row's first token
        logits: CheckLogits = {}
        for step in range(len(self._tokens)):
            order = [int(rid) for rid in batch.ids]
            lengths = zip(order, batch.lengths, strict=True)
            positions = [n + (inputs.position_delta if i else 0) for i, n in lengths]
            output = self._reference.forward(batch, [tokens[i][step] for i in order], positions)
            logits |= {(i, first[i] + step): output[row] for row, i in enumerate(order)}
        return logits
