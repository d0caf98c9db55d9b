"""Scores answers by the code of lm-evaluation-harness, which has it from the authors of the data sets."""

from __future__ import annotations

import importlib
import random
from importlib.util import find_spec
from typing import Any

for _name in ("lm_eval", "langdetect", "nltk"):
    if find_spec(_name) is None:
        raise ImportError(f"there is no {_name}, which this task needs: pip install 'mlxrun[tasks]'")

Json = dict[str, Any]


def score_ifeval(answer: str, expected: Json) -> Json:
    """Score whether an answer follows all instructions of its prompt. `expected`: the row of the data set.
    The language of an answer is guessed with a fixed seed, so that it has the same score each time."""
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    utils: Any = importlib.import_module("lm_eval.tasks.ifeval.utils")
    found = utils.process_results(expected, [answer])
    names = ("prompt_level_strict_acc", "prompt_level_loose_acc")
    scores = {name: float(found[name]) for name in names}
    return {"score": scores[names[0]], "scores": scores, "extracted": found["inst_level_strict_acc"]}


def score_mmmu(answer: str, expected: Json) -> Json:
    """Score an answer to a question of MMMU. `expected`: `question_type`, `options` and `answer` of its row.
    Of an answer without a letter a random one counts, as in the harness; equal answers get the same one."""
    utils: Any = importlib.import_module("lm_eval.tasks.mmmu.utils")
    random.seed(answer)
    return {"score": utils.process_results(expected, [answer])["acc"]}
