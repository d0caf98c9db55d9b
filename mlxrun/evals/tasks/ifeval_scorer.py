"""Scores answers to IFEval by the checks of lm-evaluation-harness, which has them from the authors."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

for _name in ("lm_eval", "langdetect", "nltk"):
    if find_spec(_name) is None:
        raise ImportError(f"there is no {_name}, whose checks ifeval needs: pip install 'mlxrun[ifeval]'")

Json = dict[str, Any]


def score_ifeval(answer: str, expected: Json) -> Json:
    """Score whether an answer follows all instructions of its prompt. `expected`: the row of the data set."""
    utils: Any = importlib.import_module("lm_eval.tasks.ifeval.utils")
    found = utils.process_results(expected, [answer])
    names = ("prompt_level_strict_acc", "prompt_level_loose_acc")
    scores = {name: float(found[name]) for name in names}
    return {"score": scores[names[0]], "scores": scores, "extracted": found["inst_level_strict_acc"]}
