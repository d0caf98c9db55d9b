"""Which rows draft, how much, and when the engine waits for tokens; with a fake model that copies."""

from __future__ import annotations

from mlxrun.config.settings import SpeculationSettings
from mlxrun.scheduler.draft_planner import DraftPlanner
from mlxrun.scheduler.memory_budget import RequestLimits
from mlxrun.scheduler.request import Request, SamplingParams
from mlxrun.scheduler.row_drafter import RowDrafter
from mlxrun.scheduler.scheduler import Scheduler
from mlxrun.scheduler.step_plan import SampledToken, StepPlan, StepResult
from tests.helpers.engine_fakes import make_settings

SETTINGS = SpeculationSettings("ngram", max_tokens=4, min_ngram=2)
PERIOD = (1, 2, 3, 4, 5, 6)


class Driver:
    """A scheduler, and a runner that reads each step one step later and answers `PERIOD`, or ever new tokens
    for requests whose id begins with `new`."""

    def __init__(self, max_rows: int = 8) -> None:
        self.planner = DraftPlanner(SETTINGS, max_rows)
        self.scheduler = Scheduler(make_settings(max_running=30), RequestLimits(1000), drafts=self.planner)
        self.outputs: dict[str, list[int]] = {}
        self.launched = StepPlan()
        self.plans: list[StepPlan] = []
        self.waits = 0

    def add(self, name: str, max_tokens: int = 100, **fields: bool) -> None:
        self.scheduler.add(Request(name, PERIOD, SamplingParams(max_tokens=max_tokens), **fields))
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
    assert steps < 60
    assert max(len(draft) for plan in driver.plans for draft in plan.drafts.values()) == 4


def test_a_row_with_new_tokens_never_waits() -> None:
    driver = Driver()
    driver.add("new")
    driver.run()
    assert driver.waits == 0 and driver.planner.counts.drafted == 0


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
