"""The checks of images and videos: prompts as the engine computes them, and by the library's own call."""

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
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.probe.embedding_checks import (
    compare_arrays,
    compare_mix,
    embed_by_library,
    find_kept_arrays,
    measure_repetition,
)
from mlxrun.model.probe.image_prompt import list_media_prompts
from mlxrun.model.probe.reference import LENGTHS, Reference, copy_cache
from mlxrun.model.probe.report import ProbeCheck, ProbeReport
from mlxrun.model.probe.rounding import ProbeLogits
from mlxrun.model.run.adapter import MediaKind, VisionAdapter
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.prompt_inputs import PromptInputs

log = logging.getLogger(__name__)

IMAGE_STEPS = 1  # tokens decoded after the prompt
_SLOWER = {  # what is done instead of each way to compute a prompt
    "chunks": "a prompt with {kind}s is computed at once up to the last of them",
    "prefix": "prompts are split as the library splits them, without a prefix cache",
    "whole": "{kind}s are refused",
}
_PLURALS: dict[str, MediaKind] = {"image": "images", "video": "videos"}


def probe_images(
    adapter: VisionAdapter, vocab: int, info: LoadedModelInfo | None, text: ProbeReport
) -> ProbeReport:
    """The report of the text checks, with those of images, and of videos if the model takes them. What cannot
    be computed exactly is refused by the adapter from now on."""
    found, cached = _MediaProbe(adapter, vocab, info, "image").compare(text, True)
    if info is not None and info.video_sampling is not None:
        found, cached = _MediaProbe(adapter, vocab, info, "video").compare(found, cached)
        if not found.images and not found.videos:
            found = compare_mix(adapter, info, found)
    return replace(found, refused=dict(adapter.refused), features_cached=cached)


@dataclass(frozen=True, slots=True)
class _MediaProbe:
    """The checks of images alone, or of videos alone."""

    adapter: VisionAdapter
    vocab: int
    info: LoadedModelInfo | None
    kind: Literal["image", "video"]

    def compare(self, report: ProbeReport, cached: bool) -> tuple[ProbeReport, bool]:
        """The report with these checks, and whether features are cached. `cached`: whether they may be."""
        if refused := self.adapter.refused[_PLURALS[self.kind]]:  # whatever they would show
            return self._add_note(report, f"refused: {refused}"), cached
        try:
            if self.info is None:
                raise MediaError("there is no image processor")
            prompts = list_media_prompts(self.info, self.kind)
        except MediaError as error:
            return self._report_uncompared(report, str(error)), cached
        checks = self._make_checks(prompts)
        if isinstance(checks, Exception):
            why = f"the library's own call fails: {type(checks).__name__}: {checks}"
            return self._report_uncompared(report, why), cached
        if checks.check_repeated(f"{self.kind} again", f"{self.kind}s are refused"):
            methods, cached = _ImageLadder(checks, report.methods, self.kind).compare(cached)
        else:
            methods, plural = report.methods, _PLURALS[self.kind]
            why = checks.done[-1].describe()
            self.adapter.refused[plural] = f"the library does not compute {plural} alike each time: {why}"
        refused = self.adapter.refused[_PLURALS[self.kind]]
        report = replace(report, methods=methods, checks=(*report.checks, *checks.done))
        return self._add_note(report, f"refused: {refused}" if refused else ""), cached

    def _make_checks(self, prompts: Sequence[ProcessedPrompt]) -> ImageChecks | Exception:
        """The checks of the first of these prompts that the library computes; its last error if it computes
        none. Some models take one image only."""
        failed: Exception = MediaError("no prompt")
        for prompt in prompts:
            try:
                reference = Reference(self.adapter, self.vocab, LENGTHS[:1], reduced=False)
                return ImageChecks(self.adapter, prompt, reference)
            except Exception as error:  # a library may raise anything: there is nothing to compare with
                failed = error
        return failed

    def _report_uncompared(self, report: ProbeReport, why: str) -> ProbeReport:
        log.warning("parity probe: %s are not compared for this model: %s", _PLURALS[self.kind], why)
        return self._add_note(report, f"not compared: {why}")

    def _add_note(self, report: ProbeReport, note: str) -> ProbeReport:
        return replace(report, images=note) if self.kind == "image" else replace(report, videos=note)


class ImageChecks:
    """Each method computes the prompt in one way. The reference's only prompt is the text beside it: its
    logits have index 0, those of the prompt with images index 1."""

    def __init__(self, adapter: VisionAdapter, prompt: ProcessedPrompt, reference: Reference) -> None:
        self.adapter = adapter
        self.done: list[ProbeCheck] = []
        self._prompt = prompt
        self._reference = reference
        self._last = len(prompt.ids) - 1
        spans = [range(*span) for span in prompt.image_spans]
        text = [token for i, token in enumerate(prompt.ids) if not any(i in span for span in spans)]
        self._answer = text[-IMAGE_STEPS:]
        self._prefilled: tuple[PromptInputs, list[Any]] | None = None
        self._own_arrays = find_kept_arrays(adapter.model)
        self._features = self._call_library(reference)

    def _call_library(self, reference: Reference) -> dict[str, Any]:
        """Add the logits of the library's own calls to the reference; returns what it made of the prompt."""
        made: list[dict[str, Any]] = []

        def compute() -> ProbeLogits:
            made.append(embed_by_library(self.adapter.model, self._prompt.ids, self._prompt.media))
            return self._compute_by_library(made[-1])

        reference.add_logits(compute)
        return made[0]

    def _compute_by_library(self, features: dict[str, Any]) -> ProbeLogits:
        """The logits of the prompt's answer, from what the library made of the prompt."""
        model, ids = self.adapter.model, mx.array([self._prompt.ids])
        given = {key: mx.array(value) for key, value in self._prompt.media.items()}
        given.pop("pixel_values", None)
        cache = self.adapter.make_cache()
        copied = {name: a[...] if isinstance(a, mx.array) else a for name, a in features.items()}
        outputs = [model.language_model(ids, cache=cache, **(given | copied)).logits]  # may write into them
        mx.eval(outputs, list_all_arrays(cache))
        for token in self._answer:
            outputs.append(model.language_model(mx.array([[token]]), cache=cache).logits)
        return {(1, step): logits[0, -1] for step, logits in enumerate(outputs)}

    def check(self, name: str, run: Any, instead: str) -> bool:
        """Compare the result of a run, and record it."""
        check = self._reference.check(name, run)
        self.done.append(check if check.passed else replace(check, instead=instead))
        return check.passed

    def prefill_chunks(self) -> ProbeLogits:
        """In chunks that end before and after images, as the scheduler splits such a prompt."""
        spans = self._prompt.image_spans
        edges = {0, spans[0][0], spans[0][1], spans[-1][1], self._last}
        return self._prefill(sorted(edge for edge in edges if edge <= self._last))

    def prefill_prefix(self) -> ProbeLogits:
        """All up to the last image at once."""
        return self._prefill(sorted({0, self._prompt.image_spans[-1][1], self._last}))

    def prefill_whole(self) -> ProbeLogits:
        return self._prefill((0, self._last))

    def _prefill(self, edges: Sequence[int]) -> ProbeLogits:
        ids, cache = self._prompt.ids, self.adapter.make_cache()
        inputs = self.adapter.prepare_inputs(ids, self._prompt.media)
        for start, stop in itertools.pairwise(edges):
            inputs = self.adapter.encode_images(inputs, start, stop)
            self.adapter.prefill(mx.array([ids[start:stop]]), cache, start, inputs)
            mx.eval(list_all_arrays(cache))
        copied = copy_cache(cache)
        self._prefilled = None if copied is None else (inputs, copied)
        tokens = [ids[-1], *self._answer]
        positions = [self._last + step + inputs.position_delta for step in range(len(tokens))]
        pairs = enumerate(zip(tokens, positions, strict=True))
        decode = self.adapter.decode
        return {(1, step): decode(mx.array([[token]]), cache, [at])[0, -1] for step, (token, at) in pairs}

    def compare_features(self) -> float:
        """The largest difference of a prompt that is made of cached features, in standard deviations of the
        library's embeddings. ValueError for other positions than the library's, as far as these come with its
        embeddings; what its language model computes is in the logits of the prompt's chunks."""
        ids, media = self._prompt.ids, self._prompt.media
        inputs = self.adapter.prepare_inputs(ids, media)
        inputs = self.adapter.encode_images(inputs, 0, len(ids))
        rest = self.adapter.prepare_inputs(ids, media, cached=self._last)
        delta, positions = (self._features.get(name) for name in ("rope_deltas", "position_ids"))
        expected = inputs.position_delta if delta is None else int(delta.item())
        if {inputs.position_delta, rest.position_delta} != {expected}:
            raise ValueError(f"positions after the images are off by other than {expected}")
        known = positions is not None and inputs.positions is not None
        if known and not mx.array_equal(inputs.positions, positions).item():
            raise ValueError("positions inside the prompt differ")
        names = ("inputs_embeds", "per_layer_inputs")
        own = [self._features[name] for name in names if name in self._features]
        mask = self._features.get("visual_pos_masks")
        shown = None if mask is None else np.array(mask).reshape(-1)[: len(ids)]
        deepstack = self._features.get("deepstack_visual_embeds")
        own += self.adapter.embedder.read_deepstack(deepstack, shown)
        found = [a for a in (inputs.embeds, inputs.per_layer, *inputs.deepstack) if a is not None]
        return max(compare_arrays(a, b) for a, b in zip(found, own, strict=True))

    def check_repeated(self, name: str, instead: str) -> bool:
        """Whether the library embeds the prompt alike whenever it is called."""
        given = (self.adapter.embedder, self._prompt, self._features, self._own_arrays)
        return self._check_embeddings(name, partial(measure_repetition, *given), instead)

    def check_features(self, name: str, instead: str) -> bool:
        """Whether a prompt that is made of cached features is the library's."""
        return self._check_embeddings(name, self.compare_features, instead)

    def _check_embeddings(self, name: str, compare: Callable[[], float], instead: str) -> bool:
        limit = self._reference.tolerance
        try:
            worst = compare()
        except Exception as error:  # as in `check_logits`
            log.debug("parity probe: %s raised", name, exc_info=True)
            found = ProbeCheck(name, False, error=f"{type(error).__name__}: {error}", limit=limit)
        else:
            found = ProbeCheck(name, bool(worst <= limit), worst, limit=limit)
        self.done.append(found if found.passed else replace(found, instead=instead))
        return found.passed

    @property
    def can_join(self) -> bool:
        """Whether the prompt's caches are at hand."""
        return self._prefilled is not None

    def decode_among_text(self, methods: ComputeMethods) -> ProbeLogits:
        """The prompt with images and the text beside it in one batch."""
        assert self._prefilled is not None
        inputs, cache = self._prefilled
        text = self._reference.prompts[0]
        batch = make_decode_batch(self.adapter.make_cache(), methods)
        rows = [JoiningRow("0", len(text) - 1, self._reference.copy_filled(0))]
        rows.append(JoiningRow("1", self._last, cache))
        self._prefilled = None  # the batch writes into it
        batch.update({"0", "1"}, rows)
        tokens = ([text[-1], *self._reference.answers[0]], [self._prompt.ids[-1], *self._answer])
        logits: ProbeLogits = {}
        for step in range(IMAGE_STEPS + 1):
            order = [int(rid) for rid in batch.ids]
            deltas = [inputs.position_delta if i else 0 for i in order]
            positions = [n + delta for n, delta in zip(batch.lengths, deltas, strict=True)]
            output = batch.forward(self.adapter.decode, mx.array([tokens[i][step] for i in order]), positions)
            mx.eval(output, batch.list_state_arrays())
            logits |= {(i, step): output[row] for row, i in enumerate(order)}
        return logits


class _ImageLadder:
    """Goes to slower ways where the engine's differ, and refuses images or videos if none is left."""

    def __init__(self, checks: ImageChecks, methods: ComputeMethods, kind: Literal["image", "video"]) -> None:
        self._checks = checks
        self._methods = methods
        self._kind = kind

    def compare(self, cached: bool) -> tuple[ComputeMethods, bool]:
        """The methods that pass, and whether features are cached. `cached`: whether they may be."""
        methods, checks, adapter, kind = self._methods, self._checks, self._checks.adapter, self._kind
        wanted = cached
        by_call = f"all {kind}s of a prompt are encoded by one call, each time"
        adapter.reset_images(cached=cached)
        cached = cached and checks.check(f"{kind} chunks", checks.prefill_chunks, by_call)
        cached = cached and checks.check_features(f"{kind} features", by_call)
        adapter.reset_images(cached=cached)
        if not cached and not self._passes(f"{kind} chunks, encoded by one call", checks.prefill_chunks):
            if self._passes(f"{kind} prefix", checks.prefill_prefix):
                methods = replace(methods, whole_media=True)
                adapter.reset_images(cached=wanted)
                cached = wanted and checks.check_features(f"{kind} features", by_call)
            elif self._passes(f"{kind} whole", checks.prefill_whole):
                methods = methods.split_as_library()
            else:
                why = checks.done[-1].describe()
                own = why.partition(" are refused for this model: ")[2]  # by the embedder
                adapter.refused[_PLURALS[kind]] = (
                    own or f"they are computed differently from the library: {why}"
                )
                return methods, cached
        if methods.decode != "row_by_row" and checks.can_join:
            run = partial(checks.decode_among_text, methods)
            if not checks.check(f"{kind} among text", run, "one forward for each row"):
                methods = replace(methods, decode="row_by_row")
        adapter.reset_images(cached=cached)
        return methods, cached

    def _passes(self, name: str, run: Callable[[], ProbeLogits]) -> bool:
        found = name.removeprefix(f"{self._kind} ").partition(",")[0]
        return self._checks.check(name, run, _SLOWER[found].format(kind=self._kind))
