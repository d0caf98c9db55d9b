"""Tokenizers made in the test process, hand-written chat templates, and a model info without a model.

`byte_tokenizer()` has ids 0 to 255 for the bytes themselves, a few merges, special tokens and added ones that
are not special (`<think>`); `metaspace_tokenizer()` is like Llama's: U+2581 for spaces and byte fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlxrun.config.media_settings import AudioSampling, VideoSampling
from mlxrun.core.model_summary import ModelSummary
from mlxrun.core.request import LoraAdapter, PooledModel, ProcessedPrompt
from mlxrun.core.transcription import SpeechModel

SPECIAL = (
    *("<|begin|>", "<|im_start|>", "<|im_end|>", "</s>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("\u0120", "w"),
    ("\u0120w", "o"),
    ("\u00c5", "\u013b"),
]
WORDS = (
    "\u2581",
    "\u2581\u2581",
    "\u2581hello",
    "\u2581world",
    "lo",
    "a",
    "b",
    "\u2581a",
    "\u2581b",
    ".",
    "\n",
    "\u0159",
)

_PARTS = (
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ text(m.content) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = _PARTS + _TURNS
# No parts, and it prints a list as Python does.
TEXT_ONLY = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# System first or nowhere, then user and assistant in turn.
STRICT = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}"
    "{% if m.role == 'system' %}{{ raise_exception('System message must come first') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% endfor %}" + CHATML
)
# Insists on a system message.
SYSTEM_ONLY_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML
)
THINKING = (
    CHATML + "{% if add_generation_prompt and not enable_thinking | default(true) %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
# Adds to strings and calls methods of arguments: what a JSON string there, or a missing content, would break.
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}("
    "{% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %})</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_chars() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE. A raw text gets `<|begin|>` in front; a rendered chat does not."""
    vocab = {char: i for i, char in enumerate(byte_chars())}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@functools.cache
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like SentencePiece in Llama: words with U+2581, bytes as <0xE4>, the first space is not text."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("<unk>", *WORDS):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def ids_of(text: str, tokenizer: Any = None) -> tuple[int, ...]:
    """Token ids of a text, special tokens in it included, nothing added."""
    tokenizer = tokenizer or byte_tokenizer()
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


DIGESTS = {"model": "m" * 64, "tokenizer": "t" * 64, "template": "c" * 64}


@dataclass(frozen=True)
class FakeModelInfo:
    """A ModelInfo. An image becomes four `<|image_pad|>`, its colour (the first pixel) is the media."""

    tokenizer: Any = field(default_factory=byte_tokenizer)
    chat_template: str | None = CHATML
    context_length: int = 4096
    vision: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)
    name: str = "fake"
    names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=lambda: DIGESTS)
    processor_digest: bytes = b""
    adapters: tuple[LoraAdapter, ...] = ()
    calls: list[str] = field(default_factory=list)
    pooled: PooledModel | None = None
    speech: SpeechModel | None = None
    video_sampling: VideoSampling | None = None
    audio_sampling: AudioSampling | None = None
    refused_media: Mapping[str, str] = field(default_factory=dict)
    summary: ModelSummary = field(default_factory=ModelSummary)
    folder: ClassVar[Path] = Path("no weights")

    @property
    def generates(self) -> bool:
        return self.speech is None and (self.pooled is None or self.pooled.generates)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.tokenizer.eos_token_id})

    def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        self.calls.append(text)
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        ids: list[int] = []
        spans = []
        for token in ids_of(text, self.tokenizer):
            if token == pad:
                spans.append((len(ids), len(ids) + 4))
            ids.extend([token] * (4 if token == pad else 1))
        return ProcessedPrompt(tuple(ids), tuple(spans), tuple(image.getpixel((0, 0)) for image in images))
