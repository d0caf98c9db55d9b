"""The report as text and as JSON values."""

from __future__ import annotations

import json

from mlxrun.model.load_check.report import ComparedWindow, LoadCheck, LoadCheckReport
from mlxrun.model.run.compute_methods import ComputeMethods


def test_a_check_says_its_difference_or_its_error() -> None:
    assert LoadCheck("a", True, 1.5e-6, limit=0.005).describe() == (
        "logits differ by 1.5e-06 standard deviations (limit 0.005)"
    )
    assert LoadCheck("a", False, error="TypeError: no offset").describe() == "TypeError: no offset"


def test_a_report_is_json() -> None:
    check = LoadCheck("snapshot", False, 2.0, limit=0.005, instead="no prefix cache")
    report = LoadCheckReport(ComputeMethods("grouped"), (check,), windows=(ComparedWindow(1024, 8),))
    found = json.loads(json.dumps(report.describe()))
    assert found["checks"][0]["instead"] == "no prefix cache" and found["decode"] == "grouped"
    assert found["windows"] == [{"size": 1024, "compared": 8}] and found["images"] == ""
    assert found["snapshots"] and not found["library_chunks"]
