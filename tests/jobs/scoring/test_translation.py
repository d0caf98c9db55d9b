"""BLEU, chrF and TER, against sacrebleu's own functions."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import sacrebleu

from mlxrun.jobs.scoring.eval_spec import check_line_eval, parse_eval
from mlxrun.jobs.scoring.line_scores import score_response
from mlxrun.jobs.scoring.score_groups import ScoreGroup, format_score

ANSWERS = ["The cat sat on mat.", "A dog runs", "", "Who is there, in the dark, at this time of the night?"]
REFERENCES = [
    ["The cat sat on the mat.", "There was a cat on the mat."],
    ["A dog is running"],
    ["Nothing."],
    ["Who is there at this hour of the night?", "Who goes there, so late in the dark?"],
]
# sacrebleu's own lists: one for each place of a reference, with None where a line has fewer.
STREAMS: list[list[str | None]] = [
    [references[at] if at < len(references) else None for references in REFERENCES] for at in range(2)
]
OF_CORPUS: dict[str, Any] = {
    "bleu": sacrebleu.corpus_bleu,
    "chrf": sacrebleu.corpus_chrf,
    "chrf++": lambda answers, streams, **more: sacrebleu.corpus_chrf(answers, streams, word_order=2, **more),
    "ter": sacrebleu.corpus_ter,
}


def score(match: str, at: int, **options: Any) -> dict[str, Any]:
    spec = parse_eval({"match": match, "expected": REFERENCES[at], **options}, {})
    return score_response(spec, {"choices": [{"message": {"content": ANSWERS[at]}}]})


@pytest.mark.parametrize("match", OF_CORPUS)
def test_a_group_has_the_corpus_metric(match: str) -> None:
    """Not the mean over lines, which is another number."""
    group = ScoreGroup()
    for at in range(4):
        group.add(score(match, at), failed=False, is_cut_answer=False)
    wanted = OF_CORPUS[match](ANSWERS, STREAMS).score
    assert group.value == pytest.approx(wanted)
    assert group.value != pytest.approx(sum(score(match, at)["score"] for at in range(4)) / 4, abs=1e-3)
    assert group.measure.better == ("lower" if match == "ter" else "higher")
    name = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER"}[match]
    assert format_score(group, with_interval=False) == f"{wanted:.{1 if wanted >= 100 else 2}f} {name}"
    assert group.interval is not None and group.interval.low < wanted < group.interval.high
    assert "share" not in group.describe() or group.describe()["share"] is None


def test_a_line_has_the_metric_of_its_own() -> None:
    assert score("bleu", 0)["score"] == pytest.approx(
        sacrebleu.sentence_bleu(ANSWERS[0], REFERENCES[0]).score
    )
    assert score("chrf", 3)["score"] == pytest.approx(
        sacrebleu.sentence_chrf(ANSWERS[3], REFERENCES[3]).score
    )
    assert score("ter", 1)["score"] == pytest.approx(sacrebleu.sentence_ter(ANSWERS[1], REFERENCES[1]).score)


def test_options_are_those_of_sacrebleu() -> None:
    small = sacrebleu.sentence_bleu(
        ANSWERS[0].lower(), [each.upper() for each in REFERENCES[0]], lowercase=True
    )
    spec = parse_eval(
        {"match": "bleu", "expected": [each.upper() for each in REFERENCES[0]], "ignore_case": True}, {}
    )
    found = score_response(spec, {"choices": [{"message": {"content": ANSWERS[0].lower()}}]})
    assert found["score"] == pytest.approx(small.score) and small.score > 30
    chars = sacrebleu.sentence_bleu(ANSWERS[1], REFERENCES[1], tokenize="char")
    assert score("bleu", 1, tokenize="char")["score"] == pytest.approx(chars.score)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"match": "bleu", "expected": 3}, "eval.expected must be a string"),
        (
            {"match": "bleu", "expected": "a", "tokenize": "13"},
            "must be one of 13a, .* \\(did you mean '13a'",
        ),
        ({"match": "chrf", "expected": "a", "tokenize": "13a"}, "belongs to the match bleu, not to chrf"),
        ({"match": "ter", "expected": "a", "ignore_case": True}, "belongs to the match exact"),
    ],
)
def test_mistakes_are_named(value: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_eval(value, {})


def test_metrics_of_choices_are_none_of_a_measure() -> None:
    spec = parse_eval({"match": "bleu", "expected": "a", "metrics": ["pass@2"]}, {})
    with pytest.raises(ValueError, match="eval.metrics are of scores from 0 to 1, and eval.match is bleu"):
        check_line_eval(spec, "/v1/chat/completions", {"n": 2})


def test_without_sacrebleu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(
        ValueError, match=r"eval.match bleu needs sacrebleu \(pip install 'mlxrun\[metrics\]'\)"
    ):
        parse_eval({"match": "bleu", "expected": "a"}, {})
