"""Tokenizers whose tokens of a part of a text are hard to know, and texts for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tokenizers import byte_chars, byte_tokenizer, metaspace_tokenizer


def true_lcp(a: Sequence[int], b: Sequence[int]) -> int:
    """One token at a time: the oracle."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@functools.cache
def nasty_tokenizer(split: bool = True, normalise: bool = True) -> PreTrainedTokenizerFast:
    """Merges across the borders of messages; added tokens that begin alike, eat spaces, depend on what is
    beside them or are found after a normaliser that looks at the whole text."""
    space, line = "\u0120", "\u010a"
    merges = [
        *((line, "h"), (line, "Z"), (line, line), (line + line, line), ("r", line), ("r" + line, "0")),
        *(("Z", "q"), (space, space), ("h", "i"), ("n", "a"), (line, "n"), (">", line), ("a", space)),
    ]
    vocab = {char: i for i, char in enumerate(byte_chars())}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if normalise:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace("  ", " "), normalizers.Strip()]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=split, use_regex=split)
    tokenizer.decoder = decoders.ByteLevel()
    exact = {"special": True, "normalized": False}
    tokenizer.add_special_tokens(
        [
            *(AddedToken(text, **exact) for text in ("<|im_start|>", "<|im_start|>user\nZ", "<|im")),
            AddedToken("<|im_end|>", lstrip=True, rstrip=True, **exact),
            AddedToken("na", single_word=True, **exact),
        ]
    )
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False, rstrip=True)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "metaspace": metaspace_tokenizer,
    "nasty": nasty_tokenizer,
    "nasty, one word": functools.partial(nasty_tokenizer, split=False),
    "nasty, as it is": functools.partial(nasty_tokenizer, normalise=False),
}

TEXTS = st.lists(
    st.sampled_from(
        [
            *("hi", "Z", "Zq", "0", "na", " ", "  ", "\n", "\n\n", "a", "\u0159", "e\u030c", "\U0001f600"),
            *(
                "<think>",
                "</think>",
                "<|im_end|>",
                "<|im_start|>",
                "<|im_start|>user\n",
                "<|im",
                "hello world",
            ),
        ]
    ),
    max_size=8,
).map("".join)
