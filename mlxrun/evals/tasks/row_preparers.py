"""What prepares the rows of tasks of the box, where a template does not suffice."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

Row = dict[str, Any]
_HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ADJECTIVES = ("brisk", "calm", "dusty", "faint", "gentle", "hollow", "lively", "noble")
_NOUNS = ("anchor", "basket", "candle", "engine", "feather", "garden", "kettle", "ladder")


def prepare_hellaswag(row: Row) -> Row:
    """Add `query` and `choices`: the texts without the marks of WikiHow."""
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    query = _clean_wikihow(f"{row['activity_label']}: {context}")
    return {**row, "query": query, "choices": [_clean_wikihow(each) for each in row["endings"]]}


def _clean_wikihow(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def prepare_truthfulqa(row: Row) -> Row:
    """Add `right`: the positions of the true answers of mc2."""
    return {**row, "right": [at for at, label in enumerate(row["mc2_targets"]["labels"]) if label == 1]}


def prepare_needle(row: Row) -> Row:
    """Add `context`, `key` and `number`: a sentence with the number among `lines` equal lines, at a `depth`
    from 0 to 1, which alone decide. The texts are those of RULER (niah_single_1)."""
    draw = random.Random(f"{row['lines']} {row['depth']}")
    key, number = f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}", str(draw.randint(10**6, 10**7 - 1))
    lines = [_HAY] * int(row["lines"])
    lines.insert(
        round(len(lines) * float(row["depth"])), f"One of the special magic numbers for {key} is: {number}."
    )
    return {**row, "context": "\n".join(lines), "key": key, "number": number}


def prepare_mmmu(row: Row) -> Row:
    """Add `text`, the question with its options; `images`, those that it names; and `subject`."""
    options = [
        f"({chr(ord('A') + at)}) {option}" for at, option in enumerate(ast.literal_eval(row["options"]))
    ]
    if row["question_type"] == "multiple-choice":
        parts = [row["question"], "\n".join(options)]
        parts.append("Answer with the option's letter from the given choices directly.")
    else:
        parts = [row["question"], "Answer the question using a single word or phrase."]
    text = "\n\n".join(parts)
    names = re.findall(r"<image ([1-7])>", text)
    subject = re.sub(r"^validation_|_\d+$", "", row["id"])
    return {**row, "text": text, "images": [row[f"image_{name}"] for name in names], "subject": subject}
