"""`python -m benchmarks sparse-recall`: whether answers still have what a long prompt says in one place.

A text is many sentences of no interest, and one or a few that each give the secret word of a city; the
question is about one of them. The beginning of the answer is given, and the model chooses among the words, as
in multiple-choice tests: small models often say something else first. The draft model scores a prompt once,
and the model answers with several shares of its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.measure_plan import MeasurePlan
from benchmarks.sparse_prefill import build_sparse_engine
from mlxrun.cli.bench.models import open_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.core.errors import ConfigError
from mlxrun.core.request import Request, SamplingParams
from mlxrun.engine.workloads.token_selection import leave_out

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine

KEEPS = (0.1, 0.2, 0.5, 1.0)
TOP = 100  # likeliest next tokens, among which the words are looked for
SLICE = 512  # tokens that the draft model reads in a forward
WHO = "The old farmer|A young teacher|My neighbour|The tall captain|Her cousin|The doctor|A painter|A clerk"
DID = "walked to|looked at|talked about|thought of|went past|wrote about|returned to|waited near|dreamed of"
WHAT = "the river|the market|the old bridge|a garden|the station|the library|a green hill|the harbour"
WHEN = "in the morning|after lunch|late at night|on Sunday|before noon|in summer|with a friend|as usual"
CITIES = "Paris Rome Oslo Cairo Lima Tokyo Delhi Madrid Berlin Dublin Athens Prague Vienna Lisbon Warsaw"
WORDS = "violin purple lemon castle rocket tiger butter anchor silver candle pepper helmet garlic magnet"


@dataclass(frozen=True, slots=True)
class RecallPrompt:
    """A text with its question, how the answer begins, and the word that is asked for."""

    text: str
    beginning: str
    word: str


def make_prompt(sentences: int, seed: int, secrets: int = 1) -> RecallPrompt:
    """A text of so many sentences, of which `secrets` give a word; the question is about one of these."""
    rng = random.Random(f"recall {seed}")
    parts = [each.split("|") for each in (WHO, DID, WHAT, WHEN)]
    text = [" ".join(rng.choice(part) for part in parts) + "." for _ in range(sentences - secrets)]
    cities, words = rng.sample(CITIES.split(), secrets), rng.sample(WORDS.split(), secrets)
    for city, word in zip(cities, words, strict=True):
        text.insert(rng.randrange(len(text)), f"The secret word of {city} is {word}.")
    question = f"What is the secret word of {cities[0]}?"
    beginning = f"The secret word of {cities[0]} is"
    return RecallPrompt(" ".join(text) + "\n\n" + question, beginning, words[0])


def run_sparse_recall_bench(
    plan: MeasurePlan,
    draft: str,
    *,
    sentences: int,
    secrets: int,
    prompts: int,
    keeps: Sequence[float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """How many of the prompts are answered with their word, by share of tokens; None: whole prompts."""
    with open_model(plan.model, plan.seed) as model, open_model(draft, plan.seed) as small:
        engine = build_sparse_engine(plan, model.folder, small.folder, 0.5)
        right: dict[float | None, list[bool]] = {None: []} | {keep: [] for keep in keeps}
        tokens: dict[float | None, list[int]] = {key: [] for key in right}
        for number in range(prompts):
            prompt = make_prompt(sentences, plan.seed + number, secrets)
            for key, request in _list_requests(engine, prompt, number, keeps).items():
                word = _choose_word(engine, request)
                right[key].append(word == prompt.word)
                tokens[key].append(len(request.prompt))
                say(f"{number + 1}/{prompts} {key or 'whole'}: {prompt.word}? {word}")
    shares = {
        "whole" if key is None else f"{key:g}": {
            "right": sum(found) / len(found),
            "tokens": sum(tokens[key]) / len(tokens[key]),
        }
        for key, found in right.items()
    }
    found = {"prompts": prompts, "secrets": secrets, "draft": small.name, "keep": shares}
    return plan.build_report(model, {"sparse-recall": found})


def _list_requests(
    engine: Engine, prompt: RecallPrompt, number: int, keeps: Sequence[float]
) -> dict[float | None, Request]:
    """The same prompt whole, and with shares of its tokens."""
    from mlxrun.model.sparse.prompt_selector import PromptSelector, choose_tokens

    assert engine.selection is not None and isinstance(engine.selection.selector, PromptSelector)
    tokenizer, draft = engine.model_info.tokenizer, engine.selection.selector
    messages = [{"role": "user", "content": prompt.text}]
    if tokenizer.chat_template is None:
        raise ConfigError("--model: has no chat template")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = (*ids, *tokenizer.encode(prompt.beginning, add_special_tokens=False))
    if len(ids) > draft.max_tokens:
        raise ConfigError(f"--sentences: make {len(ids)} tokens; the models read {draft.max_tokens}")
    scores = draft.weigh(ids, SLICE)
    whole = Request(f"{number}", ids, SamplingParams(max_tokens=1, logprobs=TOP), sparse=False)
    return {None: whole} | {keep: leave_out(whole, choose_tokens(scores, keep)) for keep in keeps}


def _choose_word(engine: Engine, request: Request) -> str | None:
    """The likeliest of the words; None if none of them is likely."""
    engine.add(request)
    found: list[int] = []
    while engine.busy:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            found += [token for each in event.logprobs for token, _ in each.top]
    tokenizer = engine.model_info.tokenizer
    begin = {tokenizer.encode(f" {word}", add_special_tokens=False)[0]: word for word in WORDS.split()}
    return next((begin[token] for token in found if token in begin), None)


def print_sparse_recall_report(report: Mapping[str, Any]) -> None:
    """Print a table of the shares."""
    console = make_console(None)
    shares = report["workloads"]["sparse-recall"]["keep"]
    cells = [
        (name, f"{found['tokens']:.0f}", f"{100 * found['right']:.0f} %") for name, found in shares.items()
    ]
    console.print(make_table(("kept", "tokens", "right answers"), 1, cells, console.is_terminal))
