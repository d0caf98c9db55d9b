"""The model's chat template: which variables it knows, how it marks an image, and rendering with it.

A template is foreign code: whatever it raises is a RequestError. Facts about one are found once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from mlxrun.errors import ModelLoadError, RequestError
from mlxrun.text.field_errors import bad, shorten, suggest, unsupported
from mlxrun.text.messages import Message
from mlxrun.text.model_info import ModelInfo

logger = logging.getLogger(__name__)

SWITCHES = ("enable_thinking", "thinking")  # what templates call the switch of thinking
_HELPERS = frozenset(("messages", "raise_exception", "strftime_now"))
_MEDIA_NAME = re.compile(r"image|img|vision|video|audio|boi|eoi", re.IGNORECASE)


class _Generation(Extension):
    """Lets `{% generation %}` parse; it only marks text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


_EXTENSIONS = ("jinja2.ext.loopcontrols", _Generation)


@functools.lru_cache(maxsize=16)
def broken_at(template: str) -> tuple[int, str] | None:
    """The line of a template that jinja does not understand, and the reason; None: there is none."""
    try:
        Environment(extensions=_EXTENSIONS).compile(template)
    except TemplateSyntaxError as exc:
        return exc.lineno, exc.message or "syntax error"
    return None


def check_template(host: ModelInfo, configured: str | None) -> None:
    """ModelLoadError, which names the file, if jinja does not understand the model's chat template.
    `configured`: the file that the config gives instead of the model's own."""
    broken = broken_at(host.chat_template) if host.chat_template is not None else None
    if broken is not None:
        line, reason = broken
        where = configured or _own_file(Path(host.tokenizer.name_or_path)) or f"the model {host.name}"
        raise ModelLoadError(f"{where}: the chat template is broken: line {line}: {reason}")


def _own_file(folder: Path) -> Path | None:
    """The file that a model's template is from; see model/model_info.py."""
    names = ("chat_template.json", "chat_template.jinja", "tokenizer_config.json")
    return next((folder / name for name in names if (folder / name).is_file()), None)


@functools.lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str]:
    """Names that the template reads and does not define."""
    environment = Environment(extensions=_EXTENSIONS)
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError as exc:
        raise RequestError(f"the model's chat template is broken: line {exc.lineno}: {exc.message}") from exc


def need_template(host: ModelInfo) -> str:
    """The model's chat template, or the error for chat with a model that has none."""
    if host.chat_template is None:
        raise RequestError(
            f"the model {host.name!r} has no chat template: use /v1/completions, or set model.chat_template",
            param="messages",
        )
    return host.chat_template


def check_arguments(host: ModelInfo, asked: Mapping[str, str], configured: Iterable[str]) -> None:
    """Refuses what the template would silently ignore; for the config's own arguments it only says so, once.

    `asked` maps each variable that a request sets to the field that sets it.
    """
    template = need_template(host)
    known = variables(template)
    signature = inspect.signature(host.tokenizer.apply_chat_template).parameters
    for name, where in asked.items():
        if name in _HELPERS or name in signature:
            raise bad(where, "is set by mlxrun and cannot be given")
        if name not in known:
            raise unsupported(where, f"the model's chat template has no such variable{suggest(name, known)}")
    _warn_unused(template, tuple(sorted(set(configured) - known)))


@functools.lru_cache(maxsize=16)
def _warn_unused(template: str, names: tuple[str, ...]) -> None:
    """Cached, so that each template is complained about once."""
    if names:
        logger.warning("model.chat_template_args: the chat template does not use %s", ", ".join(names))


def render(
    host: ModelInfo,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    *,
    begin: bool = True,
) -> str:
    """The prompt as text, up to where the assistant is to speak; `begin`: its message is begun."""
    template = need_template(host)
    try:
        text = host.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=begin,
            tokenize=False,
            **arguments,
        )
    except Exception as exc:  # a border: templates are foreign code and raise anything
        reason = shorten(str(exc), 300) or type(exc).__name__
        raise RequestError(f"messages: the chat template refuses them: {reason}", param="messages") from exc
    return str(text)


def may_think(host: ModelInfo, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer may begin a thought by itself: as the template's switch stands, else as the template
    does without being asked. A template without a switch leaves it to the model."""
    if host.chat_template is None:
        return True
    switches = [name for name in SWITCHES if name in variables(host.chat_template)]
    asked = next((arguments[name] for name in switches if arguments.get(name) is not None), None)
    if asked is not None or not switches:
        return asked is None or bool(asked)
    return _thinks_unasked(host.tokenizer, host.chat_template, switches[0])


@functools.lru_cache(maxsize=16)
def _thinks_unasked(tokenizer: Any, template: str, switch: str) -> bool:
    """Whether a prompt without the switch is another than one with it off; yes if none can be rendered."""
    message = [{"role": "user", "content": "x"}]
    try:
        unasked, off = (
            tokenizer.apply_chat_template(
                message, chat_template=template, add_generation_prompt=True, tokenize=False, **arguments
            )
            for arguments in ({}, {switch: False})
        )
    except Exception:  # a border: foreign code
        logger.debug("chat template probe failed", exc_info=True)
        return True
    return bool(unasked != off)


@dataclass(frozen=True, slots=True)
class Places:
    """How a vision model's prompts mark an image, and which words of a user would be taken for one."""

    images: bool = False  # whether the template writes anything for an image
    per_image: Mapping[int, int] = field(default_factory=dict)  # token id -> how many of it an image brings
    reserved: Mapping[str, int] = field(default_factory=dict)  # text -> id of tokens with a meaning in media

    def reserved_in(self, text: str) -> str | None:
        """The first reserved token that `text` spells."""
        return next((token for token in self.reserved if token in text), None)

    def check(self, ids: Sequence[int], images: int) -> None:
        """Refuses a rendered prompt that does not mark exactly `images` images."""
        if images and not self.images:
            raise unsupported("messages", "the model's chat template has no place for images")
        counts = Counter(ids)
        for token, each in self.per_image.items():
            if counts[token] != each * images:
                found = counts[token] // each
                raise bad("messages", f"{images} images were sent, but the chat template marks {found}")


def places(host: ModelInfo) -> Places:
    """The image marks of a vision model; empty for a text model."""
    return _places(host.tokenizer, host.chat_template) if host.vision else Places()


@functools.lru_cache(maxsize=8)
def _places(tokenizer: Any, template: str | None) -> Places:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    plain, marked = _probe(tokenizer, template) if template is not None else ("", "")
    count = [Counter(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (plain, marked)]
    brought = {
        i: n for i, n in count[1].items() if i in added and not count[0][i] and added[i].content.strip()
    }
    special = {i: n for i, n in brought.items() if added[i].special}
    per_image = special or brought
    if plain != marked and not per_image:
        logger.warning("the chat template marks images with ordinary text; the marks are not counted")
    media = {
        token.content: i
        for i, token in added.items()
        if i in per_image or (token.special and _MEDIA_NAME.search(token.content))
    }
    return Places(plain != marked, per_image, media)


def _probe(tokenizer: Any, template: str) -> tuple[str, str]:
    """A prompt without and with an image; both empty if the template cannot render parts.

    The second try is for templates that insist on a system message.
    """
    text, image = {"type": "text", "text": "x"}, {"type": "image"}
    for before in ([], [{"role": "system", "content": "x"}]):
        try:
            plain, marked = (
                tokenizer.apply_chat_template(
                    [*before, {"role": "user", "content": parts}], chat_template=template, tokenize=False
                )
                for parts in ([text], [image, text])
            )
        except Exception:  # a border: foreign code
            logger.debug("chat template probe failed", exc_info=True)
        else:
            printed = (
                "'type'" in marked or '"type"' in marked
            )  # the list as it is: the template knows no parts
            return ("", "") if printed else (plain, marked)
    return "", ""
