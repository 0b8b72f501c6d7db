"""A chat template computes within bounds, whatever it says; within them it renders as before."""

import resource
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chat_templates import TEXT_ONLY, chatml, tokenizer_of
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.render.bounds import Bounded, TemplateLoops
from turntree.render.template import ChatRenderer

LOOPS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in 'x' * 99999 %}{% for j in 'x' * 99999 %}{{ '' }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
)
DOUBLING = "{{% set ns = namespace(a={0}) %}}{{% for i in range(80) %}}{{% set ns.a = {1} %}}{{% endfor %}}{2}"
LARGE = (
    "{{ 'x' * 10**10 }}",
    "{% set n = 10**9 %}{{ 'x' * n }}",
    "{{ [1] * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ 9 ** (9**9) }}",
    "{% set n = 9**9 %}{% for i in range(60) %}{% set n = 3**n %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ ('\t' * 99999).expandtabs(99999) }}",
    "{{ ('\n' * 99999) | indent(99999) }}",
    "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).join('y' * 99999) }}",
    "{{ range(99999) | join('x' * 99999) }}",
    "{{ [1, 2] | batch(1000000000, 'x') | list }}",
    "{{ [[1, 2]] | tojson(indent=1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "{{ lipsum(n=1000000) }}",
    DOUBLING.format("'x'", "ns.a ~ ns.a", "{{ ns.a }}"),
    DOUBLING.format("'x'", "ns.a + ns.a", "{{ ns.a }}"),
    DOUBLING.format("[1]", "ns.a + ns.a", ""),
    DOUBLING.format("[1]", "[ns.a, ns.a]", "{{ ns.a }}"),
    DOUBLING.format("[1]", "[ns.a, ns.a]", "{{ ns.a | tojson }}"),
    DOUBLING.format("[1]", "[ns.a, ns.a]", "{{ ns.a | string }}"),
    DOUBLING.format("[1]", "[ns.a, ns.a]", "{{ 'x' ~ ns.a }}"),
    DOUBLING.format("[1]", "{'a': ns.a, 'b': ns.a}", "{{ '%s' % (ns.a,) }}"),
)
ORDINARY = (
    "{{ '=' * 80 }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ '%s: %5.2f' % ('a', 1.5) }}{{ '{:>8}|{}'.format('a', [1]) }}",
    "{{ [1, 'a', {'b': none}] | tojson(indent=4) }}{{ 'a' ~ 1 ~ none ~ undefined_name ~ [1] }}{{ [1] + [2] }}",
    "{% for a in 'abcd' if a != 'c' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}e{% endfor %}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "{% macro m(x, y='z') %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{% call m('q') %}in{% endcall %}",
    "{{ ' a b '.strip().split(' ') | join('-') | upper | replace('A', 'xx') | center(20) | indent(2) }}",
    "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ 1 > 0 }}",
    "{% filter upper %}a{% endfilter %}{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort | first }}{{ 'abc'[1:] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ x | default('d') }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | sum }}{{ 'a,b' | list | length }}{{ 3.14159 | round(2) }}",
)


def within(megabytes, work):
    """Run `work`, which may not take more memory than that."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + megabytes * 2**20, before[1]))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_loops_is_refused(source):
    with pytest.raises(TemplateLoops, match="does not end within"):
        ChatRenderer(tokenizer_of(source + TEXT_ONLY))


@pytest.mark.parametrize("source", LARGE)
def test_a_template_that_makes_something_endless_is_refused_before_it_is_made(source):
    with pytest.raises(InputError) as refused:
        within(1500, lambda: ChatRenderer(tokenizer_of(source + TEXT_ONLY)))
    assert "MemoryError" not in str(refused.value)


@pytest.mark.parametrize("source", [LOOPS[0], LARGE[1]])
def test_a_template_that_looks_harmless_until_a_conversation_is_long_is_refused_then(source):
    renderer = ChatRenderer(tokenizer_of("{% if messages | length > 6 %}" + source + "{% endif %}" + TEXT_ONLY))
    messages = [Message(role, "hi") for _ in range(4) for role in ("user", "assistant")]
    assert renderer.written(messages[:4])
    with pytest.raises(TemplateLoops):
        renderer.written(messages)


def test_a_template_that_loops_with_tools_only_is_refused_when_they_come():
    renderer = ChatRenderer(tokenizer_of("{% if tools %}" + LOOPS[0] + "{% endif %}" + chatml()))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert renderer.prompt([Message("user", "hi")])
    with pytest.raises(TemplateLoops):
        renderer.prompt([Message("user", "hi")], [tool])


@pytest.mark.parametrize("source", ORDINARY)
def test_what_templates_do_is_rendered_as_without_bounds(source):
    given = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded = Bounded(trim_blocks=True, lstrip_blocks=True)
    assert bounded.from_string(source).render(**given) == plain.from_string(source).render(**given)


def test_half_a_character_is_rendered_as_the_replacement_character():
    renderer = ChatRenderer(tokenizer_of(chatml()))
    assert renderer.prompt([Message("user", "a\ud800")]) == renderer.prompt([Message("user", "a\ufffd")])
