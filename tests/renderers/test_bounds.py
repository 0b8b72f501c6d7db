"""A chat template that does not come to an end is refused when it is loaded; what is half a character is rendered."""

import sys

import pytest

from chat_templates import TEXT_ONLY, chatml, tokenizer_of
from turntree.core.messages import Message
from turntree.renderers.bounds import TemplateLoops
from turntree.renderers.template import ChatRenderer

LOOPS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in 'x' * 99999 %}{% for j in 'x' * 99999 %}{{ '' }}{% endfor %}{% endfor %}",
)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_loops_is_refused_and_tracing_is_as_before(loop):
    before = sys.gettrace()
    with pytest.raises(TemplateLoops, match="does not end within"):
        ChatRenderer(tokenizer_of(loop + TEXT_ONLY))
    assert sys.gettrace() is before


def test_a_template_that_loops_with_tools_only_is_refused_when_they_come():
    renderer = ChatRenderer(tokenizer_of("{% if tools %}" + LOOPS[0] + "{% endif %}" + chatml()))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert renderer.prompt([Message("user", "hi")])
    with pytest.raises(TemplateLoops):
        renderer.prompt([Message("user", "hi")], [tool])


def test_half_a_character_is_rendered_as_the_replacement_character():
    renderer = ChatRenderer(tokenizer_of(chatml()))
    assert renderer.prompt([Message("user", "a\ud800")]) == renderer.prompt([Message("user", "a\ufffd")])
