"""Models whose vocabulary has the tokens of an infill format."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from mlxrun.api.text.raw_prompts import InfillFormat
from tests.helpers.tokenizers import FakeModelInfo, byte_tokenizer


def make_infill_model(found: InfillFormat, of: Any = byte_tokenizer) -> FakeModelInfo:
    """A model whose vocabulary has the tokens of a format."""
    plain = of()
    tokenizer = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    added = [AddedToken(each, special=True, normalized=False) for each in (*found.marks, *found.ends)]
    tokenizer.add_special_tokens(added)
    return FakeModelInfo(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=plain.eos_token)
    )
