"""How large the grammar of a request may be. Refusals are RequestErrors that name the field."""

from __future__ import annotations

from typing import Any

from mlxrun.core.field_errors import check_type, get_json_type, reject

MAX_CHARACTERS = 1 << 20  # of a grammar
MAX_CHOICES = 20_000  # compiled in some 100 ms
MAX_EBNF_CHARACTERS = 1 << 16
MAX_EBNF_RULES = 1_000  # translated in half a second; four times that for twice as many


def check_length(length: int, param: str) -> None:
    """Refuse a grammar of more than MAX_CHARACTERS."""
    if length > MAX_CHARACTERS:
        reject(
            param, f"has {length} characters; at most {MAX_CHARACTERS} are allowed", code="invalid_grammar"
        )


def check_text(value: Any, param: str) -> str:
    """The text of a grammar."""
    text: str = check_type(value, str, param)
    check_length(len(text), param)
    if not text.strip():
        reject(param, "is empty")
    return text


def check_rules(value: Any, param: str) -> str:
    """The text of an EBNF grammar without blank lines. Its translation takes time by the square of its rules,
    and by their number times the text's length."""
    text = "\n".join(line for line in check_text(value, param).splitlines() if line.strip())
    if len(text) > MAX_EBNF_CHARACTERS:
        limit = f"at most {MAX_EBNF_CHARACTERS} are allowed in EBNF"
        reject(param, f"has {len(text)} characters; {limit}", code="invalid_grammar")
    if (rules := text.count("::=")) > MAX_EBNF_RULES:
        reject(param, f"has {rules} rules; at most {MAX_EBNF_RULES} are allowed", code="invalid_grammar")
    return text


def check_choices(value: Any, param: str) -> list[str]:
    """The strings to choose from, each once."""
    check_type(value, list, param)
    if not value:
        reject(param, "is empty; give at least one string to choose")
    if len(value) > MAX_CHOICES:
        reject(param, f"has {len(value)} strings; at most {MAX_CHOICES} are allowed", code="invalid_grammar")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            reject(f"{param}[{i}]", f"expected string, got {get_json_type(text)}", code="invalid_type")
    return list(dict.fromkeys(value))
