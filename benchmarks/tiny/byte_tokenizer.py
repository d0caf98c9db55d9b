"""The byte-level tokenizer of all tiny models: 256 bytes, the special tokens of every family, 300 in all.

Ids 0 to 255 are the bytes themselves. One list for all families: a prompt means the same to each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MORE = ["<|image|>", "<IMG_CONTEXT>", "<img>", "</img>", "<|IMG_PATCH|>", "<video>"]
AUDIO = ["<unk>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
UNUSED = [f"<|unused_{i}|>" for i in range(300 - 256 - len(SPECIALS + ADDED + MORE + AUDIO))]
_LAST = [*MORE, *UNUSED, *AUDIO]
TOKEN_ID = {token: 256 + i for i, token in enumerate([*SPECIALS, *ADDED, *_LAST])}
VOCAB = 300
EOS = TOKEN_ID["<|im_end|>"]
PAD = TOKEN_ID["<|endoftext|>"]
TOKENS = {"vocab_size": VOCAB, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": PAD}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type in ('image', 'image_url') %}IMAGE{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_chars() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (printable ones for themselves)."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    return [chr(b) if b in own else chr(256 + rest.index(b)) for b in range(256)]


def place_specials(names: Sequence[str]) -> dict[str, int]:
    """The ids of special tokens that a family has alone. They stand where unused ones are, behind the first,
    which begins texts."""
    return {name: TOKEN_ID[unused] for name, unused in zip(names, UNUSED[1:], strict=False)}


def save_tokenizer(
    folder: Path, chat_template: str = CHATML, specials: Sequence[str] = (), **extra: Any
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; `extra` goes into the second. With
    a `bos_token` there, texts begin with it. `specials`: as of `place_specials`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(_byte_chars())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    own = {id: name for name, id in place_specials(specials).items()}
    last = [own.get(TOKEN_ID[name], name) for name in _LAST]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in last])
    if bos := extra.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, TOKEN_ID[bos])]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        **extra,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
