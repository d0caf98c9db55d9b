"""Which rows draft, how much, and when the engine waits for tokens; with a fake model that copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from mlxrun.config.settings import SpeculationSettings
from mlxrun.core.draft_source import CheckedSource, KnownRow
from mlxrun.core.memory_budget import RequestLimits
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.step_plan import SampledToken, StepPlan, StepResult
from mlxrun.engine.scheduler.draft_planner import DraftPlanner
from mlxrun.engine.scheduler.row_drafter import Acceptance, RowDrafter
from mlxrun.engine.scheduler.scheduler import Scheduler
from tests.helpers.engine_fakes import make_settings
from tests.helpers.fake_source import FakeSource

SETTINGS = SpeculationSettings("ngram", max_tokens=4, min_ngram=2)
PERIOD = (1, 2, 3, 4, 5, 6)


class Driver:
    """A scheduler, and a runner that reads each step one step later and answers `PERIOD`, or ever new tokens
    for requests whose id begins with `new`. `source` drafts, and nothing else but with `looks_up`."""

    def __init__(
        self,
        max_rows: int = 8,
        source: FakeSource | None = None,
        looks_up: bool = False,
        row_cost: float = 0.0,
    ) -> None:
        looks_up = looks_up or source is None
        checked = None if source is None else CheckedSource(source)
        self.planner = DraftPlanner(SETTINGS, max_rows, source=checked, looks_up=looks_up, row_cost=row_cost)
        self.scheduler = Scheduler(make_settings(max_running=30), RequestLimits(1000), drafts=self.planner)
        self.outputs: dict[str, list[int]] = {}
        self.launched = StepPlan()
        self.plans: list[StepPlan] = []
        self.waits = 0

    def add(self, name: str, max_tokens: int = 100, stop_ids: tuple[int, ...] = (), **fields: bool) -> None:
        params = SamplingParams(max_tokens=max_tokens, stop_ids=frozenset(stop_ids))
        self.scheduler.add(Request(name, PERIOD, params, **fields))
        self.outputs[name] = []

    def step(self) -> None:
        if self.planner.awaits_tokens(self.scheduler.requests):
            self.waits += 1
            plan = StepPlan()
        else:
            plan = self.scheduler.schedule()
            assert not (plan.drafts and self.launched.decode), "drafts follow unread tokens"
            self.plans.append(plan)
        before, self.launched = self.launched, plan
        tokens = {name: self._sample(name, before.drafts.get(name, ())) for name in before.decode}
        live = {state.id for state in self.scheduler.requests}
        self.scheduler.update(plan, StepResult({k: v for k, v in tokens.items() if k in live}))

    def _sample(self, name: str, draft: tuple[int, ...]) -> tuple[SampledToken, ...]:
        found: list[SampledToken] = []
        output = self.outputs[name]
        for wanted in (*draft, None):
            known = len(output)
            token = 100 + known if name.startswith("new") else PERIOD[known % len(PERIOD)]
            output.append(token)
            found.append(SampledToken(token))
            if token != wanted:
                break
        return tuple(found)

    def run(self) -> int:
        """Steps until all requests have ended."""
        for step in range(1000):
            if not self.scheduler.busy:
                return step
            self.step()
        raise AssertionError("no end")


def test_a_row_that_copies_gets_many_tokens_a_step() -> None:
    driver = Driver()
    driver.add("a", max_tokens=101)
    steps = driver.run()
    assert driver.outputs["a"] == [PERIOD[i % 6] for i in range(101)]
    counts = driver.planner.counts
    assert counts.accepted == counts.drafted and counts.steps <= 22
    assert driver.planner.declined < counts.steps  # only at first
    assert steps < 60
    assert max(len(draft) for plan in driver.plans for draft in plan.drafts.values()) == 4


def test_a_row_with_new_tokens_never_waits() -> None:
    driver = Driver()
    driver.add("new")
    driver.add("barred", speculation=False)
    driver.run()
    assert driver.waits == 0 and driver.planner.counts.drafted == 0
    assert driver.planner.describe()["declined"] == 100  # the other row has as many steps


def test_one_row_that_copies_does_not_hold_up_many() -> None:
    """It would gain less than all rows lose."""
    drafted = []
    for others in (25, 3):
        driver = Driver(64)
        driver.add("a")
        for i in range(others):
            driver.add(f"new {i}")
        while not all(state.decoding for state in driver.scheduler.requests):
            driver.step()
        before = driver.planner.counts.drafted
        for _ in range(10):
            driver.step()
        drafted.append(driver.planner.counts.drafted - before)
    assert drafted[0] == 0 < drafted[1]


def test_drafts_keep_within_the_rows_of_a_forward() -> None:
    driver = Driver(max_rows=6)
    for i in range(4):
        driver.add(f"{i}")
    driver.run()
    sizes = [(len(p.decode), sum(map(len, p.drafts.values()))) for p in driver.plans if p.drafts]
    assert sizes and all(rows + drafted <= 6 for rows, drafted in sizes)


def test_no_draft_goes_beyond_the_answer() -> None:
    driver = Driver()
    driver.add("a", max_tokens=7)
    driver.run()
    assert driver.outputs["a"] == [1, 2, 3, 4, 5, 6, 1]


def test_a_request_may_decline() -> None:
    driver = Driver()
    driver.add("a", speculation=False)
    driver.run()
    assert driver.planner.counts.drafted == driver.waits == 0


def test_a_row_stops_where_drafts_fail_and_starts_again_where_they_hold() -> None:
    drafter = RowDrafter(SETTINGS)
    drafter.read_prompt(list(PERIOD))
    drafter.append((1, 2))
    assert drafter.expect() > 0 and drafter.propose(9) == (3, 4, 5, 6)
    for _ in range(6):  # the pair recurs, and what follows is new each time
        drafter.append((90 + drafter.num_tokens, 1, 2))
    assert drafter.expect() == 0.0 and drafter.propose(9) == ()
    for _ in range(4):
        drafter.append(PERIOD)
    assert drafter.expect() > 0


def predict_new(tokens: list[int]) -> int:
    """What rows answer whose id begins with `new`."""
    return 100 + len(tokens) - len(PERIOD)


def predict_most(every: int) -> Callable[[list[int]], int]:
    """The same, but for every so manyth token."""
    return lambda tokens: 0 if len(tokens) % every == 0 else predict_new(tokens)


def run_source(source: FakeSource, rows: int = 1, max_rows: int = 40, max_tokens: int = 101) -> Driver:
    driver = Driver(max_rows, source)
    for row in range(rows):
        driver.add(f"new {row}", max_tokens)
    driver.run()
    for row in range(rows):
        assert driver.outputs[f"new {row}"][:max_tokens] == [*range(100, 100 + max_tokens)]
    return driver


def test_a_source_drafts_what_no_row_can_copy() -> None:
    driver = run_source(FakeSource(predict_new))
    found = driver.planner.describe()
    assert found["method"] == "fake" and found["problem"] is None
    assert found["drafted"] == found["accepted"] == found["model"]["accepted"] > 70
    assert found["model"] == {"cost": 0.1} | {key: found[key] for key in ("steps", "drafted", "accepted")}


def test_rows_are_drafted_for_together() -> None:
    source = FakeSource(predict_new)
    run_source(source, rows=4)
    assert [4, 4, 4, 4] in source.received
    assert all(sum(limits) + 4 <= 40 for limits in source.received)


@pytest.mark.parametrize(("cost", "every"), [(0.9, 100), (0.3, 1)])
def test_a_source_that_costs_more_than_it_gains_is_left_alone(cost: float, every: int) -> None:
    """One is as slow as its target; the other one is always wrong, and is tried again now and then."""
    source = FakeSource(predict_most(every), cost)
    driver = run_source(source, max_tokens=501)
    assert len(driver.plans) + driver.waits < 540
    assert bool(source.received) == (cost < 0.5) and len(source.received) < 20
    assert cost > 0.5 or driver.plans[-300:] and any(plan.drafts for plan in driver.plans[-300:])


def test_drafts_are_longer_the_more_of_them_hold_and_the_less_they_cost() -> None:
    def measure(cost: float, every: int) -> float:
        source = FakeSource(predict_most(every), cost)
        driver = run_source(source, max_tokens=301)
        return driver.planner.counts.drafted / max(driver.planner.counts.steps, 1)

    assert measure(0.05, 50) > measure(0.05, 3) > measure(0.25, 3)
    assert measure(0.05, 50) > 3.5


def test_a_row_waits_until_the_source_has_read_its_prompt() -> None:
    source = FakeSource(predict_new, slice_size=2)
    driver = run_source(source, max_tokens=30)
    assert driver.plans[2].decode and not any(plan.drafts for plan in driver.plans[:4])
    assert any(plan.drafts for plan in driver.plans)


def test_the_better_of_both_drafts() -> None:
    """Rows that copy are left to the n-grams where the source is wrong, and the others to the source."""
    for predict, wins in ((predict_new, "source"), (lambda tokens: 0, "ngram")):
        source = FakeSource(predict)
        driver = Driver(40, source, looks_up=True)
        driver.add("new")
        driver.add("copies")
        driver.run()
        found = driver.planner.describe()
        assert found["method"] == "fake+ngram"
        assert found["accepted"] - found["model"]["accepted"] > 40, "the copies"
        assert (found["model"]["accepted"] > 40) == (wins == "source")


def test_a_source_forgets_rows_that_end_or_are_preempted() -> None:
    source = FakeSource(predict_new)
    driver = Driver(40, source)
    driver.add("new a")
    driver.add("new b", max_tokens=10)
    while not any(plan.drafts for plan in driver.plans):
        driver.step()
    driver.step()
    assert set(source.read) == {"new a", "new b"}
    driver.scheduler.preempt(driver.scheduler.requests[0])
    assert set(source.read) == {"new b"}
    driver.scheduler.abort("new a")
    driver.run()
    assert source.read == {}


def test_nothing_is_drafted_from_a_stop_token_on() -> None:
    driver = Driver(40, FakeSource(predict_new))
    driver.add("new", stop_ids=(112,))
    for _ in range(40):
        if driver.scheduler.busy:
            driver.step()
    assert driver.planner.counts.accepted == driver.planner.counts.drafted > 5
    assert not any(112 in draft for plan in driver.plans for draft in plan.drafts.values())


@pytest.mark.parametrize("call", ["takes", "advance", "is_ready", "propose", "forget"])
def test_a_source_that_fails_drafts_no_more_and_fails_no_request(call: str) -> None:
    source = FakeSource(predict_new)
    driver = Driver(40, source, looks_up=True)
    driver.add("new")
    for _ in range(10):
        driver.step()
    drafted = driver.planner.counts.drafted
    source.fails = call
    driver.add("new b")
    driver.run()
    assert driver.outputs["new b"] == driver.outputs["new"] == [*range(100, 200)]
    found = driver.planner.describe()
    assert (
        found["method"] == "ngram"
        and found["problem"] == "fake is off because it failed: RuntimeError: planted"
    )
    assert call == "forget" or 0 < found["drafted"] <= drafted + 4


def test_a_request_may_decline_a_source_too() -> None:
    for taken in (False, True):
        source = FakeSource(predict_new, taken=taken)
        driver = Driver(40, source)
        driver.add("new", speculation=not taken)
        driver.run()
        assert not source.received and not source.read and driver.waits == 0


def test_drafts_are_shorter_where_each_row_of_a_forward_costs() -> None:
    """With half of the predictions right, a row that costs as much as it gains is left out."""
    depths = []
    for row_cost in (0.0, 0.2, 0.9):
        source = FakeSource(predict_most(4))
        driver = Driver(64, source, row_cost=row_cost)
        for row in range(3):
            driver.add(f"new {row}", 200)
        driver.run()
        counts = driver.planner.counts
        depths.append(counts.drafted / counts.steps if counts.steps else 0.0)
    assert depths[0] > depths[1] > depths[2] == 0.0


def test_a_source_reads_nothing_while_no_row_of_a_forward_is_free() -> None:
    source = FakeSource(predict_new)
    driver = Driver(3, source)
    for row in range(3):
        driver.add(f"new {row}", 40 + 20 * (row == 0))
    while not driver.plans or len(driver.plans[-1].decode) < 3:
        driver.step()
    source.read.clear()
    for _ in range(10):
        driver.step()
    assert not source.read and len(driver.plans[-1].decode) == 3
    driver.run()
    assert source.received and driver.outputs["new 0"] == [*range(100, 160)]


def test_each_place_of_a_draft_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source as a head is: first tokens are right, and later ones wrong. The twin takes all places to be
    alike, of which half are right, and drafts further ones in vain."""

    class Head(FakeSource):
        def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> list[tuple[int, ...]]:
            drafts = super().propose(rows, limits)
            return [draft[:1] + (0,) * (len(draft) - 1) for draft in drafts]

    def measure() -> tuple[float, float]:
        """The mean depth of drafts, and tokens in the time of a step."""
        source = Head(predict_new)
        driver = run_source(source, max_tokens=501)
        depths = [max(limits) for limits in source.received]
        time = sum(1 + 0.2 * bool(plan.drafts) for plan in driver.plans if plan.decode)
        return sum(depths) / len(depths), 501 / (time + source.cost * sum(depths))

    depth, speed = measure()
    estimate = Acceptance.estimate_rates
    monkeypatch.setattr(
        Acceptance, "estimate_rates", lambda known, count: [sum(estimate(known, 2)) / 2] * count
    )
    other_depth, other_speed = measure()
    assert depth < 1.3 < 1.9 < other_depth and speed > 1.05 * other_speed


@pytest.mark.parametrize(
    ("share", "cost", "least", "most"), [(0.0, 0.05, 0.97, 1), (0.5, 0.3, 0.97, 1), (0.8, 0.15, 1.7, 2.2)]
)
def test_what_drafts_gain_and_lose(share: float, cost: float, least: float, most: float) -> None:
    """In steps' time, where so large a share of predictions holds, by chance."""
    source = FakeSource(
        lambda tokens: predict_new(tokens) if random.Random(f"{len(tokens)}").random() < share else 0, cost
    )
    driver = run_source(source, max_tokens=501)
    time = sum(1 + 0.2 * bool(plan.drafts) for plan in driver.plans if plan.decode)
    time += sum(cost * max(limits) for limits in source.received)
    assert least < 501 / time <= most


def test_a_row_is_not_to_blame_for_one_that_was_aborted_with_drafts_under_way() -> None:
    """The step with the drafts of both is read before another one is planned, and fails then."""
    driver = Driver()
    driver.add("a")
    driver.add("b")
    while len(driver.launched.drafts) < 2:
        driver.step()
    driver.scheduler.abort("b")
    assert driver.scheduler.step_failed(StepPlan(), RuntimeError("planted")) == []
    driver.launched = StepPlan()
    assert [state.id for state in driver.scheduler.requests] == ["a"]
    driver.outputs["a"] = driver.outputs["a"][: len(driver.scheduler.requests[0].output)]
    driver.run()
    assert driver.outputs["a"][:100] == [PERIOD[i % 6] for i in range(100)]


def test_nothing_is_learnt_from_a_step_that_failed() -> None:
    driver = Driver(40, FakeSource(predict_new))
    driver.add("new")
    while not driver.launched.drafts:
        driver.step()
    (state,) = driver.scheduler.requests
    driver.add("other")
    driver.scheduler.schedule()
    assert driver.scheduler.step_failed(StepPlan(), RuntimeError("planted")) == []
    known = state.acceptance
    assert known is not None
    before = known.expect(1)
    driver.planner.record(state, [1], 0)
    assert abs(known.expect(1) - before) < 0.01, "a token that nobody drafted counts as a rejected one"
