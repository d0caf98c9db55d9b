"""Checks what must fit together in a suite: sources, templates, names, and settings that would have no
effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mlxrun.config.setting_fields import list_fields
from mlxrun.core.field_errors import suggest
from mlxrun.evals.suites.suite_file import Step, SuiteFile
from mlxrun.evals.suites.suite_settings import MEDIA_COLUMNS, FewShot, SuiteTask
from mlxrun.evals.tasks.task_box import SOURCES, list_task_names
from mlxrun.jobs.agents.agent_settings import parse_agent
from mlxrun.jobs.scoring.eval_spec import MATCHES, find_unknown_key

Problem = tuple[Sequence[Step], str]
TASK_KEYS = ("prompt", "few_shot.count", "few_shot.seed")  # of `vary`, besides generation.NAME
GENERATION = "generation."
SAMPLING = "sampling."
_OF_SERVERS = ("server.", "apis.", "telemetry.")
_OF_BODIES = ("server.strict_fields", "server.max_prompt_tokens", "server.strip_billing_header")  # lines too
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # a model and a task become folders
_OWN_FILES = ("suite.json", "suite.yaml", "report.html", "report.md")  # beside the folders of models
_TEMPLATES = ("prompt", "prompts", "messages", "template")
_MISSING_JUDGE = (
    "there is no judge: give the task `judge: {prompt: ..., verdict: ...}`, or `judge: later` for one that "
    "`mlxrun score --judge FILE` brings"
)
NOT_IN_GENERATION = ("messages", "prompt", "input", "stream", "model", "id", "url", "eval")


def check_suite(file: SuiteFile) -> None:
    """Report problems of names, tasks and `vary`. Tasks with a problem become `harmed`."""
    for section, names in (("models", list(file.suite.models)), ("tasks", list(file.suite.tasks))):
        _check_names(file, section, names)
    for name, task in list(file.suite.tasks.items()):
        if task.use not in (None, *list_task_names()):
            file.harmed.add(name)  # nobody knows which keys it lacks
            continue
        problems = [*_check_sources(task), *_check_template(task), *_check_agent(task), *_check_rest(task)]
        for steps, message in problems:
            file.report(("tasks", name, *steps), message)
        if problems:
            file.harmed.add(name)
    _check_vary(file)


def _check_names(file: SuiteFile, section: str, names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        first = seen.setdefault(name.casefold(), name)
        if not _NAME.fullmatch(name):
            message = "a name becomes a folder: use letters, digits, `.`, `_` and `-`"
        elif section == "models" and name.casefold() in _OWN_FILES:
            message = "a file of the suite's folder has this name"
        elif first != name:
            message = f"the names {first!r} and {name!r} would be one folder on some file systems"
        else:
            continue
        file.report((section, name), message, at_key=True)


def _check_sources(task: SuiteTask) -> Iterator[Problem]:
    if not list_sources(task):
        yield (), "`data`, `hub` or `rows` is missing"
    for steps, source in (((), task), (("few_shot",), task.few_shot)):
        first, *others = list_sources(source) or [""]
        for name in others:
            yield (*steps, name), f"`{first}` is given too; give one of them"


def list_sources(source: SuiteTask | FewShot | None) -> list[str]:
    """List the keys with which a task, or its examples, name where rows come from. Valid is one at most."""
    return [name for name in SOURCES if getattr(source, name, None)]


def _check_template(task: SuiteTask) -> Iterator[Problem]:
    given = [name for name in _TEMPLATES if getattr(task, name)]
    if not given:
        yield (), f"one of {', '.join(_TEMPLATES)} is missing"
    for name in given[1:]:
        yield (name,), f"`{given[0]}` is given too; give one of them"
    for name in ("messages", *MEDIA_COLUMNS, *(["system"] if task.is_perplexity else [])):
        if task.is_completion and getattr(task, name):
            why = "`choices` need a completion" if task.choices else "`endpoint` is completion"
            why = "`perplexity` is that of a text" if task.is_perplexity else why
            yield (name,), f"only chats have {name}, and {why}"
    for name in ("system", *MEDIA_COLUMNS):
        if getattr(task, name) and task.messages:
            yield (name,), "`messages` has all messages of a line; write it there"
    if task.choices and task.template:
        yield ("choices",), "a template file is a whole line; write `prompt` for a multiple choice"


def _check_agent(task: SuiteTask) -> Iterator[Problem]:
    if task.agent is None:
        return
    if task.is_completion:
        yield ("agent",), "only chats have tool calls"
    try:
        parse_agent(task.agent.dump())
    except ValueError as error:
        yield ("agent",), str(error)
    for name, why in (("tools", "`agent` has the tools"), ("n", "for several conversations, use `seeds`")):
        if name in task.generation:
            yield ("generation", name), why


def _check_rest(task: SuiteTask) -> Iterator[Problem]:
    if task.choices and task.generation:
        yield ("generation",), "nothing is generated for `choices`, so it would have no effect"
    for key in task.generation:
        if key in NOT_IN_GENERATION:
            yield ("generation", key), "this is no setting of a generation"
    for steps, match in ((("match",), task.match), (("eval", "match"), task.eval.get("match"))):
        if isinstance(match, str) and "{" not in match and match not in MATCHES:
            known = ", ".join(map(repr, MATCHES))
            suggestion = suggest(match, MATCHES)
            yield steps, f"{match!r} is not one of {known}{suggestion}"
        if match == "judge" and task.judge is None and "scorer" not in task.eval:
            yield steps, _MISSING_JUDGE
    yield from _find_unknown_key(task)
    if task.choices and task.match not in (None, "likeliest"):
        yield ("match",), "answers of `choices` are compared by `likeliest` only"
    for name in ("choices", "expected", "few_shot", "judge"):
        if task.is_perplexity and getattr(task, name):
            yield (name,), "it would have no effect on `perplexity`, which is that of the prompt"
    is_expected = task.expected is not None or "expected" in task.eval
    if not is_expected and task.judge is None and not task.is_perplexity:
        for name in ("match", "group"):
            if getattr(task, name) is not None:
                yield (name,), "it needs `expected`"
    if task.choices and (not is_expected or isinstance(task.expected, dict)):
        yield ("choices",), "`choices` need a column as `expected`, or `expected` in `eval`"
    for name in ("expected", "match", "group"):
        if name in task.eval and getattr(task, name) is not None:
            yield ("eval", name), f"`{name}` of the task is given too; give one of them"


def _find_unknown_key(task: SuiteTask) -> Iterator[Problem]:
    usual = "judge" if task.judge is not None else "likeliest" if task.choices else "exact"
    match = task.match or task.eval.get("match") or usual
    if match in MATCHES:
        found = find_unknown_key(task.eval, match, match == "judge" or "scorer" in task.eval)
        if found is not None:
            yield ("eval", found[0]), f"it {found[1]}"


def _check_vary(file: SuiteFile) -> None:
    """Report keys that are not known, values that do not fit, and settings without effect; such keys are left
    out of the suite."""
    suite = file.suite
    known = [*list_fields(), *TASK_KEYS]
    for key, values in list(suite.vary.items()):
        problems = list(_find_vary_problems(file, key))
        if key == SAMPLING + "seed":
            problems.append("write `seeds: [...]` for seeds")
        elif key not in known and not key.startswith(GENERATION):
            problems.append(f"unknown key{suggest(key, known)}")
        if not values:
            problems.append("it is empty")
        if len({(isinstance(each, bool), each) for each in values}) < len(values):  # 1 is 1.0, and not true
            problems.append("it has a value twice")
        for message in problems:
            file.report(("vary", key), message, at_key=True)
        if problems:
            del suite.vary[key]
    _check_prompts(file)
    fixed = [name for name, task in suite.tasks.items() if "seed" in task.generation]
    if len(suite.seeds) > 1 and fixed:
        file.report(("seeds",), f"they would have no effect on {fixed[0]!r}, whose generation sets a seed")
    if len(set(suite.seeds)) < len(suite.seeds):
        file.report(("seeds",), "it has a value twice")


def _check_prompts(file: SuiteFile) -> None:
    """Report tasks with several prompts of which none is chosen, and leave them out of the suite."""
    if "prompt" in file.suite.vary:
        return
    for name, task in list(file.suite.tasks.items()):
        if task.prompts:
            if file.tree.find(("vary", "prompt")) is None:
                file.report(("tasks", name, "prompts"), "`vary: {prompt: [...]}` has to name those that run")
            del file.suite.tasks[name]


def _find_vary_problems(file: SuiteFile, key: str) -> Iterator[str]:
    tasks, values = file.suite.tasks, file.suite.vary[key]
    if key.startswith(SAMPLING) and key != SAMPLING + "seed":
        name = key.removeprefix(SAMPLING)
        for task in (name_ for name_, each in tasks.items() if name in each.generation):
            yield f"it would have no effect on the task {task!r}, whose generation sets {name}"
        if GENERATION + name in file.suite.vary:
            yield f"it would have no effect beside {GENERATION}{name}, which requests have"
    if key.startswith(_OF_SERVERS) and key not in _OF_BODIES:
        yield "it is of servers, and would have no effect on runs"
    if key == "prompt":
        with_prompts = {name: task.prompts for name, task in tasks.items() if task.prompts}
        if tasks and not with_prompts:
            yield "no task has `prompts`"
        for task, prompts in with_prompts.items():
            for value in values:
                if value not in prompts:
                    yield f"the task {task!r} has no prompt {value!r}; it has {', '.join(prompts)}"
    elif key in TASK_KEYS:
        least = 1 if key == "few_shot.count" else 0
        if any(isinstance(value, bool) or not isinstance(value, int) or value < least for value in values):
            yield f"its values are integers from {least} on"
        if tasks and all(task.few_shot is None for task in tasks.values()):
            yield "no task has `few_shot`"
