"""BLEU, chrF, chrF++ and TER by sacrebleu: of a line, and of all lines together.

A line's counts are added up over lines, and the figure is that of the sums, as sacrebleu computes it for a
corpus. It is not the mean over lines. The score of a line is the metric of this line alone (for BLEU with
sacrebleu's `effective_order`, as its `sentence_bleu`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

# sacrebleu's class, its arguments, the unit, and whether lower is better.
TRANSLATION: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "bleu": ("BLEU", {}, "BLEU", False),
    "chrf": ("CHRF", {}, "chrF", False),
    "chrf++": ("CHRF", {"word_order": 2}, "chrF++", False),
    "ter": ("TER", {}, "TER", True),
}
TOKENIZERS = ("13a", "intl", "char", "zh", "none")  # of BLEU; the others of sacrebleu need further packages


def check_sacrebleu(match: str) -> None:
    """Raise ValueError if sacrebleu is not installed."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise ValueError(f"eval.match {match} needs sacrebleu (pip install 'mlxrun[metrics]')")


def score_translation(
    name: str, answer: str, references: Sequence[str], options: Mapping[str, Any]
) -> tuple[float, dict[str, float]]:
    """Return the metric of a line, and its counts by name. `options`: `ignore_case`; `tokenize` of BLEU."""
    given = {"lowercase": options.get("ignore_case", False)} if name != "ter" else {}
    metric = _make_metric(name, **given, **{key: options[key] for key in ("tokenize",) if key in options})
    counts = metric._extract_corpus_statistics([answer], [[each] for each in references])[0]
    if name == "bleu":
        metric = _make_metric(name, effective_order=True)
    score = float(metric._compute_score_from_stats(counts).score)
    return score, {f"count_{at:02}": float(count) for at, count in enumerate(counts)}


def compute_translation(name: str, sums: Mapping[str, Array]) -> Array:
    """Compute the metric of added counts: one number for each element of the arrays."""
    import numpy as np

    metric = _make_metric(name)
    rows = np.stack([sums[key] for key in sorted(sums)], axis=-1).tolist()
    return np.array([metric._compute_score_from_stats(row).score for row in rows], dtype=float)


@cache
def _make_metric(name: str, **arguments: Any) -> Any:
    import sacrebleu.metrics

    class_name, own, _, _ = TRANSLATION[name]
    return getattr(sacrebleu.metrics, class_name)(**own, **arguments)
