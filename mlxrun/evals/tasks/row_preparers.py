"""What prepares the rows of tasks of the box, where a template does not suffice."""

from __future__ import annotations

import re
from typing import Any

Row = dict[str, Any]


def prepare_hellaswag(row: Row) -> Row:
    """Add `query` and `choices`: the texts without the marks of WikiHow."""
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    query = _clean_wikihow(f"{row['activity_label']}: {context}")
    return {**row, "query": query, "choices": [_clean_wikihow(each) for each in row["endings"]]}


def _clean_wikihow(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
