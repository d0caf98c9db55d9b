"""What is said of runs as wholes."""

from __future__ import annotations

import json
from pathlib import Path

from mlxrun.evals.reports import report_runs
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import chats
from tests.helpers.report_jobs import run_lines


def test_times() -> None:
    runs = [{"started": "2026-11-22T13:05:36+00:00", "ended": "2026-11-22T13:06:00+00:00"}]
    assert report_runs.describe_times({"runs": runs}) == "22 Nov 2026 13:05 to 13:06 UTC"
    killed = {"started": "2026-11-21T09:00:00+00:00", "ended": None}
    assert report_runs.describe_times({"runs": [killed, *runs]}) == (
        "21 Nov 2026 09:00 to 22 Nov 2026 13:06 UTC, in 2 runs, 1 of them killed"
    )
    running = {"started": "2026-11-23T01:00:00+00:00", "ended": None}
    jobs = {"runs": [*runs, running]}, {"runs": [killed, *runs, running]}
    assert [report_runs.describe_times(job, is_running=True).split("UTC")[1] for job in jobs] == [
        ", in 2 runs",
        ", in 3 runs, 1 of them killed",
    ]
    assert report_runs.describe_times(jobs[0]).endswith("in 2 runs, 1 of them killed")
    idle = {"started": "2026-11-23T01:00:00+00:00", "ended": "2026-11-23T01:00:01+00:00"}
    idle |= dict.fromkeys(("computed", "reused", "done", "failed"), 0)  # type: ignore[arg-type]
    assert report_runs.describe_times({"runs": [*runs, idle]}) == "22 Nov 2026 13:05 to 13:06 UTC"
    assert report_runs.describe_times({"runs": [idle]}) == "23 Nov 2026 01:00 to 01:00 UTC"
    assert report_runs.describe_times({"runs": []}) == "" and "?" in report_runs.describe_times(
        {"runs": [{"started": 4}]}
    )


def test_machine_and_hits() -> None:
    manifest = {"device": {"name": "M4", "backend": "metal"}, "versions": {"mlxrun": "1.0"}}
    assert report_runs.describe_machine(manifest) == "M4, metal · mlxrun 1.0"
    assert report_runs.describe_machine({"device": None}) == "mlxrun ?"
    hits = {"exact": 1, "prefix": 0, "lcp": 1200, "miss": 3}
    assert (
        report_runs.describe_hits({"cache": {"hits": hits}})
        == "whole prompt 1, shared beginning 1,200, nothing 3"
    )
    assert report_runs.describe_hits({}) == ""


async def test_differences_name_each_setting_once(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        bench = await run_lines(tmp_path / name, chats(2))
        paths.append(bench.paths.out)
    manifest = json.loads(bench.paths.manifest.read_text())
    manifest["config"]["sampling"]["temperature"] = manifest["settings"]["sampling"]["temperature"] = 1.5
    manifest["config"]["server"]["api_keys"] = {"secret": "sk-1"}
    bench.paths.manifest.write_text(json.dumps(manifest))
    runs = read_runs(paths).runs
    assert report_runs.list_differences(runs) == [("sampling.temperature", ["", "1.5"])]
    assert "sk-1" not in json.dumps(report_runs.collect_settings(runs[1].manifest)), "a report has no keys"


def test_the_span_of_several_jobs() -> None:
    early = {"runs": [{"started": "2026-11-21T09:00:00+00:00", "ended": None}]}
    late = {"runs": [{"started": "2026-11-22T13:05:36+00:00", "ended": "2026-11-22T13:06:00+00:00"}]}
    assert report_runs.describe_span([late, early]) == "21 Nov 2026 09:00 to 22 Nov 2026 13:06 UTC"
    assert report_runs.describe_span([{"runs": []}]) == "? UTC"
