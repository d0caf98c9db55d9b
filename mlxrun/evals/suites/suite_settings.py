"""Every key of a suite file with its default, its range and its description.

The JSON Schema and the reference of suites are generated from this module. The string under a field is its
description, `Annotated` metadata is its range. A field without a default is required.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mlxrun.config.setting_annotations import Range
from mlxrun.jobs.agents.agent_settings import AgentLoop
from mlxrun.jobs.scoring.perplexity import PERPLEXITY

Scalar = str | int | float | bool | None
MEDIA_COLUMNS = ("images", "audio")  # keys of a task that name a column


@dataclass(frozen=True, slots=True)
class SuiteModel:
    """A model of the suite: a config file, single keys of the config, or both. An empty model has the config
    that other commands would use."""

    config: str | None = None
    """Config file, relative to the suite. null: that of `-c`, else the one that every command uses."""
    set: dict[str, Any] = field(default_factory=dict)
    """Keys of the config, such as `model.path: Qwen/Qwen3-0.6B`; they override the file and variables."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A data set of the Hugging Face hub. It needs `pip install 'mlxrun[hub]'`."""

    name: str
    """Name on the hub, such as `openai/gsm8k`, or a local folder of data files relative to the suite."""
    split: str = "test"
    """Split whose rows are used."""
    subset: str | None = None
    """Name of the subset (also called configuration), where the data set has several."""
    revision: str | None = None
    """Branch, tag or commit. Name a commit so that others get the same rows."""


@dataclass(frozen=True, slots=True)
class FewShot:
    """Examples that stand before each question, made by the task's own template. They are the same for all
    lines, so their prompt is computed once. A row is never an example of itself."""

    answer: str
    """Template of an example's answer, such as `"{{ answer }}"`."""
    count: Annotated[int, Range(1, 1000)] = 5
    """Number of examples."""
    seed: Annotated[int, Range(0, None)] = 0
    """Seed that chooses the examples and their order."""
    order: Literal["random", "first"] = "random"
    """Whether the `seed` chooses, or the first rows are taken in their order."""
    by: str | None = None
    """Column of both tables: a question gets examples that have its own value there."""
    data: str | None = None
    """Table with the examples, relative to the suite. null, without `hub` and `rows`: that of the task."""
    hub: HubSource | None = None
    """Data set of the hub with the examples."""
    rows: tuple[dict[str, Any], ...] = ()
    """The examples themselves, as mappings with the columns that the templates use."""
    separator: str = "\n\n"
    """Text after each example of a completion; in chats, examples are messages."""


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """A task: rows, the request that each row becomes, and how its answer is scored. Templates are Jinja;
    their variables are the columns of the row."""

    use: str | None = None
    """Task that comes with mlxrun (`mlxrun tasks` lists them), whose keys those given here replace."""
    data: str | None = None
    """CSV, TSV, JSONL or Parquet file, relative to the suite; a .txt file is one row with a column `text`."""
    hub: HubSource | None = None
    """Data set of the hub, instead of `data`."""
    rows: tuple[dict[str, Any], ...] = ()
    """The rows themselves, as mappings, instead of `data`."""
    prepare: str | None = None
    """Python function that gets each row as a dict and returns the one to use, as `FILE.py:function` relative
    to the suite or `module:function`. Examples from a table pass through it too."""
    prompt: str | None = None
    """Template of the user's message, or of the prompt of a completion."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Several such templates by name, instead of `prompt`; `vary: {prompt: [...]}` names those that run."""
    messages: tuple[Any, ...] = ()
    """Template of a whole list of messages, instead of `prompt`."""
    template: str | None = None
    """File with the template, instead of `prompt`, relative to the suite: as for `mlxrun job make`."""
    system: str | None = None
    """Template of a system message before the `prompt`; of a completion, the text before all examples."""
    images: str | None = None
    """Column with an image of each row, or a list of them, which come before the `prompt`. Paths are relative
    to the data file. Missing files are found before the run, damaged ones by `--dry-run` or at their
    line."""
    audio: str | None = None
    """Column with a sound of each row, or a list of them, behind the images and before the `prompt`. Paths
    are relative to the data file."""
    endpoint: Literal["chat", "completion"] = "chat"
    """Whether the `prompt` is a message of a chat, or a text that the model continues."""
    choices: str | tuple[str, ...] = ()
    """Templates of the answers of a multiple choice, or one such as `"{{ options }}"` for a column with a
    list. The likelihood of each after the `prompt` is computed, and nothing is generated."""
    delimiter: str = " "
    """Text between the prompt of a completion and each choice, or the answer of an example."""
    few_shot: FewShot | None = None
    """Examples before each question."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Fields of the request, such as `max_tokens`, `temperature`, `stop`, `response_format` or `n`."""
    agent: AgentLoop | None = None
    """A tool loop: the model calls tools, turn by turn, until it answers."""
    id: str | None = None
    """Column with the id of each line. null: `custom_id`, `id`, or row-1, row-2 and so on."""
    expected: str | dict[str, Any] | None = None
    """Column with the expected answer. With `choices`: the text, the letter, or the number from 0 of one, or
    a list of them. `expected` in `eval` is a template of it. A mapping is what is expected of every row, such
    as a JSON schema."""
    match: str | None = None
    """How an answer is compared with it, as in the `eval` of a job line. null: `exact`, or `likeliest` with
    `choices`. `perplexity` expects nothing: it measures how well the model predicts the `prompt`."""
    group: str | None = None
    """Column with the group in which a line is scored."""
    eval: dict[str, Any] = field(default_factory=dict)
    """Further keys of the `eval` of each line, with templates in their strings. A `scorer` that is a file
    (`FILE.py:function`) is relative to the suite; a module is found from the working directory."""
    judge: str | dict[str, Any] | None = None
    """A judge that scores the answers in a second pass on the same engine, or the file that has it, relative
    to the suite: see docs/evals.md. `mlxrun score --judge` lets another model judge; with `later`, answers
    wait for it."""
    limit: Annotated[int | None, Range(1, None)] = None
    """Only the first rows."""

    @property
    def expected_column(self) -> str | None:
        """The column with the expected answer; None if nothing is expected, or the same of every row."""
        return self.expected if isinstance(self.expected, str) else None

    @property
    def has_user(self) -> bool:
        """Whether a model plays the user."""
        return self.agent is not None and self.agent.user is not None

    @property
    def is_perplexity(self) -> bool:
        """Whether the texts of the prompts are measured, and nothing is generated."""
        return self.match == PERPLEXITY

    @property
    def media(self) -> dict[str, str]:
        """The columns with media, by their keys, in the order of their parts in a message."""
        found = {key: getattr(self, key) for key in MEDIA_COLUMNS}
        return {key: column for key, column in found.items() if column is not None}

    @property
    def is_completion(self) -> bool:
        """Whether the `prompt` is a text, and no message."""
        return self.endpoint == "completion" or bool(self.choices) or self.is_perplexity


@dataclass(frozen=True, slots=True)
class Suite:
    """Models x tasks x seeds, and any other setting. Each combination is a cell, which is an ordinary job."""

    models: dict[str, SuiteModel]
    """The models by name."""
    tasks: dict[str, SuiteTask]
    """The tasks by name."""
    version: Literal[1] = 1
    """Version of the format of suites."""
    seeds: tuple[Annotated[int, Range(0, None)], ...] = ()
    """Seeds from which those of the lines are derived (`sampling.seed`). Empty: that of the config."""
    vary: dict[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """Settings with several values, of which every combination runs: keys of the config such as
    `sampling.temperature` or `model.path`, `prompt` (names in `prompts`), `few_shot.count`, `few_shot.seed`,
    or a field `generation.NAME`."""
