"""Writes tests/helpers/golden/embeddings.json: what sentence-transformers computes with the tiny models of
tests/helpers/pooling_models.py.

It needs torch and sentence-transformers, which mlxrun does not; make an environment for them:

    python -m venv /tmp/reference && /tmp/reference/bin/pip install torch==2.13.0 sentence-transformers
    PYTHONPATH=. /tmp/reference/bin/python tools/embedding_golden.py
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.pooling_models import (
    CROSS_ENCODERS,
    EMBEDDING_MODELS,
    QUERY,
    TEXTS,
    build_pooling_model,
)

FILE = Path(__file__).parents[1] / "tests" / "helpers" / "golden" / "embeddings.json"


def compute_golden(folder: Path) -> dict[str, Any]:
    """Embeddings of each text and, where there is such a prompt, of the query; scores of each pair."""
    library: Any = importlib.import_module("sentence_transformers")
    found: dict[str, Any] = {"library": library.__version__}
    for name in EMBEDDING_MODELS:
        model = library.SentenceTransformer(str(build_pooling_model(name, folder / name)), device="cpu")
        found[name] = _round(model.encode(list(TEXTS), batch_size=2))
        if "query" in model.prompts:
            found[f"{name} query"] = _round(model.encode([QUERY], prompt_name="query"))
    for name in CROSS_ENCODERS:
        model = library.CrossEncoder(str(build_pooling_model(name, folder / name)), device="cpu")
        found[name] = _round(model.predict([(QUERY, text) for text in TEXTS], batch_size=2))
    return found


def _round(values: Any) -> Any:
    return [_round(each) for each in values] if getattr(values, "ndim", 1) > 0 else round(float(values), 7)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        FILE.write_text(json.dumps(compute_golden(Path(scratch)), indent=0) + "\n", encoding="utf-8")
