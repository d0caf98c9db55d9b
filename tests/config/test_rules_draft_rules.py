"""Settings of sparse prefill and speculation that contradict others, or would have no effect."""

from __future__ import annotations

import pytest

from tests.helpers.config_files import load, load_errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "prefill: {sparse: draft}",
            "prefill.sparse: the tokens are chosen by a draft model: set model.draft",
        ),
        ("model: {draft: embedded}", "model.draft: has no effect while prefill.sparse is off"),
        (
            "prefill: {sparse_keep: 0.5}",
            "prefill.sparse_keep: prefill.sparse is off, so prefill.sparse_keep has no effect; set",
        ),
        (
            "prefill: {sparse: draft}\nmodel: {draft: embedded}\nengine: {reproducible: true}",
            "prefill.sparse: leaves out tokens of prompts, so that engine.reproducible cannot hold",
        ),
        (
            "prefill: {sparse: draft}\nmodel: {draft: a b}",
            "model.draft: 'a b' is neither 'embedded' nor a folder",
        ),
    ],
)
def test_sparse_prefill(text: str, said: str) -> None:
    (found,) = load_errors(text + "\n")
    assert said in found


ON = "prefill: {sparse: draft}\nmodel: {draft: embedded"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ON + ", kind: vision}", "is for text models that generate, and model.kind is vision"),
        (ON + ", kind: reranker}", "is for text models that generate, and model.kind is reranker"),
        (
            "prefill: {sparse: draft, sparse_keep: 1}\nmodel: {draft: embedded}",
            "prefill.sparse_keep: 1 leaves out no token, so that prefill.sparse only costs time; set less",
        ),
        (
            ON + ", context_length: 8192}",
            "sparse_min_tokens 8192 is longer than all prompts: model.context_length is 8192",
        ),
    ],
)
def test_sparse_prefill_that_would_never_be(text: str, said: str) -> None:
    (found,) = load_errors(text + "\n")
    assert said in found


@pytest.mark.parametrize("rest", [", kind: text}", ", context_length: 8193}"])
def test_sparse_prefill_that_can_be(rest: str) -> None:
    """Beside quantized keys, which prompts have not."""
    assert load(ON + rest + "\ncache: {kv_bits: 8}\n").config.prefill.sparse == "draft"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "speculation: {min_ngram: 9}",
            "a.yaml:1:26: speculation.min_ngram: min_ngram 9 is more than max_ngram 8",
        ),
        (
            "speculation: {max_ngram: 9}",
            "a.yaml:1:26: speculation.max_ngram: speculation.method is off, so speculation.max_ngram has no "
            "effect; set speculation.method or remove it",
        ),
        (
            "speculation: {method: auto, min_ngram: 9, max_ngram: 8}",
            "a.yaml:1:40: speculation.min_ngram: min_ngram 9 is more than max_ngram 8",
        ),
        (
            "speculation: {method: auto}\ncache: {kv_bits: 8}",
            "a.yaml:1:23: speculation.method: auto drafts nothing while keys are quantized (cache.kv_bits "
            "8); remove one of them",
        ),
        (
            "speculation: {method: ngram}\ncache: {kv_bits: 4}",
            "a.yaml:1:23: speculation.method: ngram drafts nothing while keys are quantized (cache.kv_bits",
        ),
        (
            "speculation: {method: draft}",
            "a.yaml:1:23: speculation.method: draft predicts with a draft model: set model.draft",
        ),
        (
            "speculation: {method: draft, min_ngram: 2}\nmodel: {draft: embedded}",
            "a.yaml:1:41: speculation.min_ngram: speculation.method is draft, so speculation.min_ngram has",
        ),
        (
            "speculation: {method: ngram}\nmodel: {draft: embedded}",
            "a.yaml:2:16: model.draft: has no effect while prefill.sparse is off and speculation.method is",
        ),
    ],
)
def test_speculation(text: str, said: str) -> None:
    assert any(line.startswith(said) for line in load_errors(text + "\n"))


def test_speculation_of_few_tokens() -> None:
    text = "speculation: {method: ngram, min_ngram: 4, max_ngram: 4}\n"
    assert load(text).config.speculation.max_ngram == 4


@pytest.mark.parametrize(
    "text",
    [
        "speculation: {method: draft}\nmodel: {draft: embedded}",
        "speculation: {method: auto, min_ngram: 2}\nmodel: {draft: embedded}",
        "speculation: {method: draft}\nmodel: {draft: embedded}\nprefill: {sparse: draft}",
    ],
)
def test_a_draft_model_that_can_be(text: str) -> None:
    assert load(text + "\n").config.model.draft == "embedded"
