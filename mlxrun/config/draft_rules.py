"""Rules against contradictions among the settings of sparse prefill, for which a draft model chooses tokens,
and of speculation, which drafts tokens (see contradictions.py)."""

from __future__ import annotations

from mlxrun.config.rules import find_changed, reads
from mlxrun.config.settings import Config


@reads("prefill.sparse", "model.draft")
def check_sparse_draft(config: Config) -> str | None:
    if config.prefill.sparse == "off" or config.model.draft is not None:
        return None
    return "the tokens are chosen by a draft model: set model.draft"


@reads("prefill.sparse_keep", "prefill.sparse")
def check_sparse_keeps_less(config: Config) -> str | None:
    if config.prefill.sparse == "off" or config.prefill.sparse_keep < 1:
        return None
    return "1 leaves out no token, so that prefill.sparse only costs time; set less or prefill.sparse off"


@reads("prefill.sparse", "model.kind")
def check_sparse_kind(config: Config) -> str | None:
    """With `auto` the model's files decide, and the engine refuses it."""
    kind = config.model.kind
    if config.prefill.sparse == "off" or kind in ("auto", "text"):
        return None
    return f"is for text models that generate, and model.kind is {kind}; remove one of them"


@reads("prefill.sparse_min_tokens", "model.context_length", "prefill.sparse")
def check_sparse_prompts_fit(config: Config) -> str | None:
    """Some prompt must be long enough to be computed sparsely."""
    least, context = config.prefill.sparse_min_tokens, config.model.context_length
    if config.prefill.sparse == "off" or context is None or least < context:
        return None
    return f"sparse_min_tokens {least} is longer than all prompts: model.context_length is {context}"


@reads("prefill.sparse", "engine.reproducible")
def check_reproducible_prefill(config: Config) -> str | None:
    if config.prefill.sparse == "off" or not config.engine.reproducible:
        return None
    return "leaves out tokens of prompts, so that engine.reproducible cannot hold; remove one of them"


@reads("model.draft", "prefill.sparse", "speculation.method")
def check_draft_is_used(config: Config) -> str | None:
    method = config.speculation.method
    drafts = method not in ("off", "ngram")
    if config.model.draft is None or config.prefill.sparse != "off" or drafts:
        return None
    return f"has no effect while prefill.sparse is off and speculation.method is {method}"


@reads("speculation.method", "model.draft")
def check_drafting_model(config: Config) -> str | None:
    if config.speculation.method != "draft" or config.model.draft is not None:
        return None
    return "draft predicts with a draft model: set model.draft"


@reads("prefill.sparse_keep", "prefill.sparse_min_tokens", "prefill.sparse")
def check_prefill_is_sparse(config: Config) -> str | None:
    given = find_changed(config.prefill, ("sparse_keep", "sparse_min_tokens"))
    if config.prefill.sparse != "off" or given is None:
        return None
    return f"prefill.sparse is off, so prefill.{given} has no effect; set prefill.sparse or remove it"


_SPECULATION_KEYS = ("max_tokens", "min_ngram", "max_ngram")


@reads(*(f"speculation.{key}" for key in _SPECULATION_KEYS), "speculation.method")
def check_speculation_is_on(config: Config) -> str | None:
    given = find_changed(config.speculation, _SPECULATION_KEYS)
    if config.speculation.method != "off" or given is None:
        return None
    off = f"speculation.method is off, so speculation.{given} has no effect"
    return f"{off}; set speculation.method or remove it"


@reads("speculation.min_ngram", "speculation.max_ngram", "speculation.method")
def check_ngrams_are_looked_up(config: Config) -> str | None:
    given = find_changed(config.speculation, ("min_ngram", "max_ngram"))
    method = config.speculation.method
    if method not in ("draft", "mtp") or given is None:
        return None
    return f"speculation.method is {method}, so speculation.{given} has no effect; set auto or remove it"


@reads("speculation.min_ngram", "speculation.max_ngram")
def check_ngrams(config: Config) -> str | None:
    """Of places that have `min_ngram` tokens in common, those with more are preferred."""
    least, most = config.speculation.min_ngram, config.speculation.max_ngram
    return None if least <= most else f"min_ngram {least} is more than max_ngram {most}"


@reads("speculation.method", "cache.kv_bits")
def check_drafts_are_verified(config: Config) -> str | None:
    """Drafts are verified by pages of keys, which are not quantised on any device."""
    method, bits = config.speculation.method, config.cache.kv_bits
    if method == "off" or bits is None:
        return None
    return f"{method} drafts nothing while keys are quantised (cache.kv_bits {bits}); remove one of them"
