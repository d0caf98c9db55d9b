"""Renders chat templates, and finds out which variables a template knows and how it marks media.

A template is foreign code: any error of it becomes a RequestError. Facts about a template are cached.
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

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from mlxrun.api.text.ignored_fields import log_ignored
from mlxrun.api.text.media.media_kinds import MediaRef
from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template_limits import LimitedEnvironment, limit_chat_templates
from mlxrun.api.text.templates.work_budget import apply_limits
from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.core.field_errors import describe_foreign_error, reject, reject_unsupported, shorten, suggest
from mlxrun.core.media_names import KINDS, PLURALS, MediaKind

logger = logging.getLogger(__name__)

REASONING_SWITCHES = ("enable_thinking", "thinking")  # names of the variable that switches reasoning
_RESERVED_VARIABLES = frozenset(("messages", "raise_exception", "strftime_now"))
MAX_TEMPLATE = 1 << 19  # characters; the longest known have some 50,000
_PROBE_SHARE = 0.1  # of the work of a template, for short conversations that only ask what it supports
_MEDIA_NAME = re.compile(r"image|img|vision|video|audio|boi|eoi", re.IGNORECASE)


class _Generation(Extension):
    """Makes `{% generation %}` parse; it only marks text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


_EXTENSIONS = ("jinja2.ext.loopcontrols", _Generation)


@functools.lru_cache(maxsize=16)
def find_syntax_error(template: str) -> tuple[int, str] | None:
    """Return the line and the reason of a template's first syntax error; None if there is none."""
    if len(template) > MAX_TEMPLATE:
        return 1, f"it has more than {MAX_TEMPLATE:,} characters"
    try:
        LimitedEnvironment(extensions=_EXTENSIONS).compile(template)
    except TemplateSyntaxError as exc:
        return exc.lineno, exc.message or "syntax error"
    except (RecursionError, MemoryError, SyntaxError):  # of Jinja's parser, or of Python's for its code
        return 1, "it is nested too deeply"
    return None


def check_template(model: ModelInfo, configured: str | None) -> None:
    """Raise ModelLoadError, which names the file, if the model's chat template has a syntax error.
    `configured`: the file that the config sets instead of the model's own."""
    limit_chat_templates()
    broken = find_syntax_error(model.chat_template) if model.chat_template is not None else None
    if broken is not None:
        line, reason = broken
        # Where a model's template may be: see model/load/model_info.py.
        names = ("chat_template.json", "chat_template.jinja", "tokenizer_config.json")
        files = (Path(model.tokenizer.name_or_path) / name for name in names)
        own = next((file for file in files if file.is_file()), None)
        where = configured or own or f"the model {model.name}"
        raise ModelLoadError(f"{where}: the chat template is broken: line {line}: {reason}")


@functools.lru_cache(maxsize=16)
def find_template_variables(template: str) -> frozenset[str]:
    """Return the names that the template reads and does not define. RequestError for a syntax error."""
    broken = find_syntax_error(template)
    if broken is not None:
        raise RequestError(f"the model's chat template is broken: line {broken[0]}: {broken[1]}")
    environment = LimitedEnvironment(extensions=_EXTENSIONS)
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


def find_reasoning_switch(model: ModelInfo) -> str | None:
    """Return the variable that switches reasoning in the model's chat template; None if it has none."""
    known = find_template_variables(model.chat_template or "")
    return next((name for name in REASONING_SWITCHES if name in known), None)


def require_template(model: ModelInfo) -> str:
    """Return the model's chat template. RequestError if it has none."""
    if model.chat_template is None:
        raise RequestError(
            f"the model {model.name!r} has no chat template: use /v1/completions, or set model.chat_template",
            param="messages",
        )
    return model.chat_template


def select_template_variables(
    model: ModelInfo, requested: Mapping[str, Any], param: str, *, strict: bool = False
) -> dict[str, Any]:
    """Return those of a request's variables, in its field `param`, that the template has. Others have no
    effect and are logged. `strict`: RequestError for them; in any case for variables that mlxrun sets."""
    known = find_template_variables(require_template(model))
    signature = inspect.signature(model.tokenizer.apply_chat_template).parameters
    for name in requested:
        where = f"{param}.{shorten(name)}"
        if name in _RESERVED_VARIABLES or name in signature:
            reject(where, "is set by mlxrun and cannot be overridden")
        if name not in known:
            reason = f"the model's chat template has no such variable{suggest(name, known)}"
            if strict:
                reject_unsupported(where, reason)
            log_ignored(where, reason)
    return {name: value for name, value in requested.items() if name in known}


def warn_unused_variables(model: ModelInfo, configured: Iterable[str]) -> None:
    """Warn, once for each template, of the config's variables that the template lacks."""
    template = require_template(model)
    _warn_unused(template, tuple(sorted(set(configured) - find_template_variables(template))))


@functools.lru_cache(maxsize=16)
def _warn_unused(template: str, names: tuple[str, ...]) -> None:
    """Cached, so that the warning is logged once per template."""
    if names:
        logger.warning("model.chat_template_args: the chat template does not use %s", ", ".join(names))


def render_chat(
    model: ModelInfo,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    arguments: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render the prompt as text. RequestError if the template raises, or goes beyond its limits.

    `add_generation_prompt`: append the start of the assistant's message."""
    template = require_template(model)
    try:
        return apply_template(
            model.tokenizer,
            template,
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
    except Exception as exc:  # templates are foreign code and may raise anything
        reason = describe_foreign_error(exc, 300)
        raise RequestError(f"messages: the chat template refuses them: {reason}", param="messages") from exc


def apply_template(
    tokenizer: Any, template: str, messages: Sequence[Message], share: float = 1.0, **arguments: Any
) -> str:
    """Render messages within the limits of work_budget.py. `share`: the part of the whole budget, 0 to 1.
    Raises what the template raises, and TemplateLimitError."""
    limit_chat_templates()
    with apply_limits(_count_characters(messages), share):
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    return str(text)


def try_template(tokenizer: Any, template: str, messages: Sequence[Message], **arguments: Any) -> str | None:
    """Render a short conversation, to find out what a template supports. None if the template raises."""
    try:
        return apply_template(tokenizer, template, messages, _PROBE_SHARE, **arguments)
    except Exception:  # foreign code may raise anything
        logger.debug("chat template probe failed", exc_info=True)
        return None


def _count_characters(messages: Sequence[Message]) -> int:
    """About how many characters messages have."""
    count = 0
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            count += len(text) if isinstance(text, str) else 0
    return count


def may_reason(model: ModelInfo, arguments: Mapping[str, Any]) -> bool:
    """Tell whether an answer may begin with reasoning. The template's switch decides if it is set, else its
    default. If there is no switch, the model decides, so it may."""
    if model.chat_template is None:
        return True
    switches = [name for name in REASONING_SWITCHES if name in find_template_variables(model.chat_template)]
    given = next((arguments[name] for name in switches if arguments.get(name) is not None), None)
    if given is not None or not switches:
        return given is None or bool(given)
    return _reasons_by_default(model.tokenizer, model.chat_template, switches[0])


@functools.lru_cache(maxsize=16)
def _reasons_by_default(tokenizer: Any, template: str, switch: str) -> bool:
    """Whether a prompt without the switch differs from one with it off; True if none can be rendered."""
    message = [{"role": "user", "content": "x"}]
    default, off = (
        try_template(tokenizer, template, message, add_generation_prompt=True, **arguments)
        for arguments in ({}, {switch: False})
    )
    return default is None or off is None or default != off


@dataclass(frozen=True, slots=True)
class ImageMarkers:
    """How the prompts of a model mark media. `per_kind`: token ids and their count per medium, for each kind
    that the template renders. `reserved`: text and id of media tokens."""

    per_kind: Mapping[MediaKind, Mapping[int, int]] = field(default_factory=dict)
    reserved: Mapping[str, int] = field(default_factory=dict)

    def check_rendered(self, refs: Sequence[MediaRef]) -> None:
        """Raise RequestError for the first image, PDF, video or audio that the template does not render."""
        for ref in refs:
            self._check_kind(ref.medium.template_part, ref.param)

    def _check_kind(self, kind: MediaKind, param: str) -> None:
        if kind not in self.per_kind:
            reject_unsupported(param, f"the model's chat template does not render {PLURALS[kind]}")

    def check(self, ids: Sequence[int], sent: Mapping[MediaKind, int]) -> None:
        """Raise RequestError unless a prompt's token ids mark exactly so many media. `sent`: of each kind
        that is there."""
        for kind in sent:
            self._check_kind(kind, "messages")
        counts = Counter(ids)
        for token in {token for tokens in self.per_kind.values() for token in tokens}:
            each = {kind: tokens.get(token, 0) for kind, tokens in self.per_kind.items()}
            if counts[token] != sum(each[kind] * count for kind, count in sent.items()):
                names = " and ".join(f"{count} {PLURALS[kind]}" for kind, count in sent.items())
                found = counts[token] // max(1, sum(each[kind] for kind in sent or each))
                text = f"{names or 'no images'} were sent, but the chat template renders {found}"
                reject("messages", text)


def get_image_markers(model: ModelInfo) -> ImageMarkers:
    """Return the markers of media of a vision model; empty for a text model."""
    return _find_image_markers(model.tokenizer, model.chat_template) if model.vision else ImageMarkers()


@functools.lru_cache(maxsize=8)
def _find_image_markers(tokenizer: Any, template: str | None) -> ImageMarkers:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    counted = {kind: _count_markers(tokenizer, template, kind) for kind in KINDS}
    image = counted["image"]
    if image is not None and not image:
        logger.warning("the chat template marks images with ordinary text, so their number cannot be checked")
    # A processor finds the marks of images and audio itself, if they are ordinary text.
    per_kind = {
        kind: marks for kind, marks in counted.items() if marks or (kind != "video" and marks is not None)
    }
    media = {
        token.content: i
        for i, token in added.items()
        if any(i in marks for marks in per_kind.values())
        or (token.special and _MEDIA_NAME.search(token.content))
    }
    return ImageMarkers(per_kind, media)


def _count_markers(tokenizer: Any, template: str | None, kind: MediaKind) -> dict[int, int] | None:
    """How often each added token stands for one medium of a kind; None if the template renders none."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    plain, marked = _render_with_and_without(tokenizer, template, kind) if template is not None else ("", "")
    if plain == marked:
        return None
    count = [Counter(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (plain, marked)]
    new = {i: n for i, n in count[1].items() if i in added and not count[0][i] and added[i].content.strip()}
    return {i: n for i, n in new.items() if added[i].special} or new


def render_image_probe(model: ModelInfo) -> str:
    """Render a prompt with one image; empty if the model's template cannot."""
    if not model.vision or model.chat_template is None:
        return ""
    return _render_with_and_without(model.tokenizer, model.chat_template, "image")[1]


def _render_with_and_without(tokenizer: Any, template: str, kind: str) -> tuple[str, str]:
    """A prompt without and with an image, a video or audio; both empty if the template cannot render parts.

    The second attempt is for templates that require a system message.
    """
    text, medium = {"type": "text", "text": "x"}, {"type": kind}
    for before in ([], [{"role": "system", "content": "x"}]):
        plain, marked = (
            try_template(tokenizer, template, [*before, {"role": "user", "content": parts}])
            for parts in ([text], [medium, text])
        )
        if plain is not None and marked is not None:
            is_list = "'type'" in marked or '"type"' in marked  # printed as it is: parts are not supported
            return ("", "") if is_list else (plain, marked)
    return "", ""
