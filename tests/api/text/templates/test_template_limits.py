"""Templates that loop or grow without end are stopped, and all others render as in Jinja's own sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxrun.api.text.templates import work_budget
from mlxrun.api.text.templates.template import apply_template, find_syntax_error, render_chat
from mlxrun.api.text.templates.template_limits import LimitedEnvironment, limit_chat_templates
from mlxrun.api.text.templates.work_budget import TemplateLimitError, WorkBudget, apply_limits
from mlxrun.core.errors import RequestError
from tests.helpers.tokenizers import FakeModelInfo

OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": ["jinja2.ext.loopcontrols"],
}


def nest(value: str, start: str = "[1]") -> str:
    """Sixty times a value of the one before."""
    return f"{{% set n = namespace(x={start}, y={start}) %}}{{% for i in range(60) %}}" + (
        f"{{% set n.x = {value} %}}{{% set n.y = {value.replace('n.x', 'n.y')} %}}{{% endfor %}}"
    )


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for a in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(9999) %}{% for a in range(9999) %}x{{ a }}{% endfor %}{% endfor %}",  # noqa: E501
    "a loop in a block": "{% block a %}{% for a in range(9999) %}{% for a in range(9999) %}{{ a }}{% endfor %}"  # noqa: E501
    "{% endfor %}{% endblock %}",
    "a macro that calls itself": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "multiplied text": "{{ 'x' * 10**10 }}",
    "a multiplied list": "{{ [1] * 10**10 }}",
    "text that doubles": nest("n.x ~ n.x", "'x'"),
    "text that is added": nest("n.x + n.x", "'x'"),
    "a list that doubles": nest("n.x + n.x"),
    "numbers that grow": nest("n.x * n.x", "3"),
    "a power": "{{ 10 ** 1000000 }}",
    "a list in itself, printed": nest("[n.x, n.x]") + "{{ n.x }}",
    "a list in itself as JSON": nest("[n.x, n.x]") + "{{ n.x|tojson }}",
    "a list in itself, joined": nest("[n.x, n.x]") + "{{ n.x ~ '' }}",
    "a list in itself, compared": nest("[n.x, n.x]") + "{{ n.x == n.y }}",
    "a list in itself, tested": nest("[n.x, n.x]") + "{{ n.x is eq(n.y) }}",
    "a list in itself, searched": nest("[n.x, n.x]") + "{{ [n.y].count(n.x) }}",
    "a list in itself, filled in": nest("[n.x, n.x]") + "{{ '%s' % n.x }}",
    "a list in itself, formatted": nest("[n.x, n.x]") + "{{ '{}'.format(n.x) }}",
    "a mapping in itself": nest("{'a': n.x, 'b': n.x}") + "{{ n.x.items() }}",
    "a namespace in itself": nest("namespace(a=n.x, b=n.x)", "1") + "{{ n.x }}",
    "a tuple as a key": nest("(n.x, n.x)", "(1,)") + "{{ {'a': 1}[n.x] }}",
    "a tuple as a new key": nest("(n.x, n.x)", "(1,)") + "{{ {n.x: 1} }}",
    "tuples that are unique": nest("(n.x, n.x)", "(1,)") + "{{ [n.x]|unique|list }}",
    "sums of lists": "{{ ([[1] * 9999] * 99999)|sum(start=[]) }}",
    "a width": "{{ 'x'.center(10**10) }}",
    "a width of a filter": "{{ 'x'|center(10**10) }}",
    "a width in a format": "{{ '{:>9999999999}'.format(1) }}",
    "a width as an argument": "{{ '{:>{}}'.format(1, 10**10) }}",
    "a width of %": "{{ '%9999999999d' % 1 }}",
    "a width of % as an argument": "{{ '%*d' % (10**10, 1) }}",
    "a width of a filter that formats": "{{ '%9999999999d'|format(1) }}",
    "replaced letters": "{{ ('x' * 9999).replace('x', 'y' * 99999) }}",
    "letters between": "{{ ('x' * 9999)|replace('', 'y' * 99999) }}",
    "long separators": "{{ ('y' * 99999).join(['a'] * 99999) }}",
    "long separators of a filter": "{{ range(99999)|map('string')|join('y' * 99999) }}",
    "a filled batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "many slices": "{{ [1]|slice(10**10)|list }}",
    "indented lines": "{{ ('\n' * 9999)|indent(99999, true, true) }}",
    "indented JSON": "{{ [1]|tojson(indent=10**10) }}",
    "wide tabs": "{{ ('\t' * 9999).expandtabs(999999) }}",
    "translated letters": "{{ ('x' * 9999).translate({120: 'y' * 99999}) }}",
    "wrapped words": "{{ ('x ' * 99999)|wordwrap(1, wrapstring='y' * 99999) }}",
    "copies of a text": "{% set x = 'x' * 10**7 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "many wide texts": "{{ range(99999)|map('center', 99999)|list|length }}",
    "a filter around text": "{% filter replace('x', 'y' * 99999) %}{{ 'x' * 9999 }}{% endfilter %}",
}


def render(template: str, environment: type[Any] = LimitedEnvironment, **given: Any) -> str:
    with apply_limits():
        return str(environment(**OPTIONS).from_string(template).render(**given))


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_stopped(name: str) -> None:
    with pytest.raises(TemplateLimitError):
        render(ENDLESS[name])


@pytest.mark.parametrize("name", ["nested loops", "text that doubles", "a list in itself, printed"])
def test_the_budget_is_what_stops_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: smaller relatives of the templates render with the budget switched off, though they
    are more than a small budget allows."""
    small = ENDLESS[name].replace("99999", "99").replace("range(60)", "range(9)")
    monkeypatch.setattr(work_budget, "BASE_BYTES", 1_000)
    with pytest.raises(TemplateLimitError):
        render(small)
    monkeypatch.setattr(WorkBudget, "check_time", lambda self: None)
    render(small)


def test_the_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_budget, "CPU_SECONDS", -1.0)
    loop = "{% for a in range(9999) %}{{ a }}{% endfor %}"
    with pytest.raises(TemplateLimitError, match="processor time"):
        render(loop)


FINE = [
    "{% for a in x.b %}{{ loop.index }}/{{ loop.length }}{{ a }}{% if not loop.last %},{% endif %}{% endfor %}",  # noqa: E501
    "{% for a in x.b if a > 1 %}{{ a }}{% else %}none{% endfor %}{% for a in [] %}{% else %}none{% endfor %}",
    "{{ 'a' ~ 1 ~ [1, 'b'] ~ none }}{{ x.b[1:] }}{{ 'abcdef'[::-2] }}{{ 'abc'[-1] }}{{ x['b'][0] }}",
    "{% macro m(n, k=2) %}<{{ n }}{{ caller() if caller else k }}>{% endmacro %}{{ m(3) }}"
    "{% call m(4) %}inside{% endcall %}",
    "{% set y %}block {{ x.a }}{% endset %}{{ y|upper|trim }}{% filter lower %}ABC{% endfilter %}",
    "{{ x == z }}{{ x != z }}{{ 1 < 2 < 3 }}{{ 'b' in 'abc' }}{{ x.a in x.b }}{{ x is mapping }}{{ q is defined }}",  # noqa: E501
    "{{ '%s-%05d' % ('a', 3) }}{{ '{} {:>5}'.format(1, 2) }}{{ '{a}'.format(a=1) }}{{ '%d' % 1700000000 }}",
    "{{ x|tojson(indent=2) }}{{ [3, 1, 2]|sort|join(', ') }}{{ x.b|map('string')|list }}{{ x.b|sum }}",
    "{{ x.b|selectattr('c', 'undefined')|list|length }}{{ [1, 2, 3]|batch(2, 0)|list }}{{ x.b|unique|list }}",
    "{{ 2 ** 10 }}{{ 7 % 3 }}{{ 2 * 3 + 4 - 1 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 1.5 * 2 }}{{ 10**20 + 10**20 }}",  # noqa: E501
    "{% set n = namespace(a=1) %}{% for i in range(5) %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}",
    "{% for k, v in x.items() %}{{ k }}={{ v }}{% endfor %}{{ x.get('a', 'd') }}{{ dict(a=1) }}",
    "{{ ' a b '.strip().split(' ') }}{{ 'a</think>b'.split('</think>')[-1].lstrip() }}{{ 'aXb'.replace('X', '-') }}",  # noqa: E501
    "{% for a in [[1, [2]], [3, []]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
    "{% for a in range(5) %}{% if a == 1 %}{% continue %}{% endif %}{% if a == 3 %}{% break %}{% endif %}{{ a }}"  # noqa: E501
    "{% endfor %}",
    "{% block b %}in a block{{ x.a }}{% endblock %}{{ 'a' if x else 'b' }}{{ 'a' if false }}{{ ','.join(['a', 'b']) }}",  # noqa: E501
    "{{ {'a': 1, x.a: 2} }}{{ {1: 'b'}[1] }}{{ (1, 2) }}{{ 'a\tb'.expandtabs(4) }}{{ 'x'.center(5, '-') }}",
]


@pytest.mark.parametrize("template", FINE)
def test_other_templates_render_as_ever(template: str) -> None:
    given = {"x": {"a": 1, "b": [1, 2, 3]}, "z": {"a": 1, "b": [1, 2, 3]}}
    assert render(template, **given) == render(template, ImmutableSandboxedEnvironment, **given)


def test_long_conversations_are_rendered() -> None:
    """A million characters in ten thousand messages, each looked at a dozen times."""
    template = (
        "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set n.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{{ '<|' + m.role + '|>' }}{{ m.content.strip().split('</think>')[-1].lstrip('\n')|replace('a', 'b') }}"  # noqa: E501
        "{% if loop.index0 == n.last %}{{ m.content|length }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "some text " * 10} for _ in range(10_000)]
    with apply_limits(1_000_000):
        limited = LimitedEnvironment().from_string(template).render(messages=messages)
    assert limited == ImmutableSandboxedEnvironment().from_string(template).render(messages=messages)


def test_bytes_and_other_makers_of_words_are_not_there() -> None:
    with pytest.raises(SecurityError):
        render("{{ 'a'.encode() * 3 }}")
    assert render("{{ lipsum is defined }}") == "False"


def test_transformers_compiles_in_the_limited_environment() -> None:
    """The contract with the library: the name of its sandbox is looked up when a template is compiled."""
    from transformers.utils import chat_template_utils

    limit_chat_templates()
    made = chat_template_utils._compile_jinja_template("{{ messages[0].content }}")
    assert isinstance(made.environment, LimitedEnvironment)
    assert made.environment.filters["tojson"].__wrapped__.__module__ == chat_template_utils.__name__


@pytest.mark.parametrize("name", ["nested loops", "text that doubles", "a list in itself as JSON"])
def test_a_request_with_such_a_template_is_refused(name: str) -> None:
    model = FakeModelInfo(chat_template=ENDLESS[name])
    with pytest.raises(RequestError, match="the chat template refuses them: it loops or grows beyond"):
        render_chat(model, [{"role": "user", "content": "a"}], None, {})


def test_what_a_template_supports_is_asked_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model, budgets = FakeModelInfo(), []
    own = WorkBudget.__init__

    def note(self: WorkBudget, characters: int = 0, share: float = 1.0) -> None:
        own(self, characters, share)
        budgets.append((characters, share))

    monkeypatch.setattr(WorkBudget, "__init__", note)
    assert model.chat_template is not None
    apply_template(model.tokenizer, model.chat_template, [{"role": "user", "content": "abc"}], 0.1)
    assert budgets == [(3, 0.1)]


def test_templates_that_cannot_be_compiled() -> None:
    deep = "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}"
    for template in (deep, "{% if a %}" * 3_000 + "{% endif %}" * 3_000, "{% for a in b %}" * 60):
        assert find_syntax_error(template) is not None
    assert find_syntax_error(deep) == (1, "it is nested too deeply")
    assert find_syntax_error("x" * 600_000) == (1, "it has more than 524,288 characters")
    assert find_syntax_error("{{ 'x'|center(10**10) }}") is None  # not computed when it is compiled
