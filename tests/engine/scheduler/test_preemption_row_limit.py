"""Fewer rows run together after memory ran out, until many steps have succeeded."""

from __future__ import annotations

from mlxrun.engine.scheduler.preemption import STEPS, RowLimit


def test_half_as_many_rows_run_after_a_shortage_until_enough_steps_have_succeeded() -> None:
    limit = RowLimit(32)
    limit.record_shortage(20)
    assert limit.rows == 10
    for _ in range(STEPS - 1):
        limit.record_success()
    assert limit.rows == 10
    limit.record_success()
    assert limit.rows == 20
    limit.record_shortage(20)
    for _ in range(2 * STEPS):
        limit.record_success()
    assert limit.rows == 32
    limit.record_shortage(1)
    assert limit.rows == 1
