"""Chat templates: rendered as they are meant, refused as requests, kept in their sandbox."""

from __future__ import annotations

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.frontend.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
USER = {"role": "user", "content": "Hi"}


def render(source, messages=(USER,), **kwargs):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages), **kwargs)


def refusal(source, messages=(USER,), **kwargs):
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages, **kwargs)
    return str(caught.value)


def test_chat_with_generation_prompt():
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("source", [CHATML, TRIMMING])
def test_the_final_message_is_continued_where_it_ends(source):
    """B30: the earlier message with the same text stays, outer spaces stay."""
    chat = [
        {"role": "user", "content": "The answer is "},
        {"role": "assistant", "content": "Is it?"},
        {"role": "user", "content": "Yes"},
        {"role": "assistant", "content": "The answer is "},
    ]
    text = render(source, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    assert text.count("<|im_start|>") == 4
    assert text.count("<|im_end|>") == 3


def test_continuing_and_starting_exclude_each_other():
    assert "exclude" in refusal(CHATML, continue_final_message=True, add_generation_prompt=True)


def test_a_template_that_hides_the_final_message_cannot_continue_it():
    text = refusal("{{ messages[0].role }}", continue_final_message=True, add_generation_prompt=False)
    assert "cannot be continued" in text


@pytest.mark.parametrize("content", [None, "", []])
def test_null_and_empty_content(content):
    assert render(CHATML, [{"role": "user", "content": content}], add_generation_prompt=False) == (
        "<|im_start|>user\n<|im_end|>\n"
    )


def test_absent_content_and_tool_calls():
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.x }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == "3"


def test_text_parts_are_joined_unless_the_template_reads_lists():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0]['content'] }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    looping = "{% for part in messages[0]['content'] %}[{{ part.text }}]{% endfor %}"
    assert render(looping, [{"role": "user", "content": parts}]) == "[one][two]"
    splitting = "{% set c = messages[0].content.split('w') %}{% for word in c %}[{{ word }}]{% endfor %}"
    assert render(splitting, [{"role": "user", "content": parts}]) == "[one\nt][o]"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must not be empty"),
        ("hi", "list of messages"),
        ({"role": "user"}, "list of messages"),
        (5, "list of messages"),
        (["hi"], r"messages[0] must be a mapping"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text parts only"),
    ],
)
def test_malformed_messages(messages, words):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML, {}).render(messages)
    assert words in str(caught.value)
    assert caught.value.param == "messages"


def test_a_refusing_template_is_the_requests_error():
    """B32."""
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    assert "System role not supported" in refusal(source, [{"role": "system", "content": "x"}])


def test_a_syntax_error_names_template_and_line():
    assert "the model's chat template has a syntax error in line 2" in refusal("\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_thing.attribute }}",
    ],
)
def test_programs_that_go_astray_are_refused(source):
    assert refusal(source)


def test_what_templates_are_written_for():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {%- generation %}{{ {'a': 'é<'} | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}{{ x }}"
    )
    assert render(source, [USER, USER], variables={"x": 7}) == '<s>{"a": "é<"}%7'
    assert "may not set messages" in refusal(source, variables={"messages": []})


GROW = "{% set ns = namespace(x=START) %}{% for i in range(80) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "source",
    [
        GROW.replace("START", "'aaaa'").replace("STEP", "ns.x ~ ns.x"),
        GROW.replace("START", "'aaaa'").replace("STEP", "ns.x + ns.x"),
        GROW.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
        GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]"),
        GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
        GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x == [] }}"),
        GROW.replace("START", "99").replace("STEP", "ns.x * ns.x"),
        GROW.replace("START", "99").replace("STEP", "ns.x ** 99"),
        "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% set x = 'a' * 1000000 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
        "{% for i in range(99999) %}" + "y" * 10_000 + "{% endfor %}",
        "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
        "{% set x = 'a' * 1000000 %}{{ (['b'] * 1000000) | join(x) }}",
        "{% set x = 'a' * 1000000 %}{{ x.join(['b'] * 1000000) }}",
        "{{ ['a' * 1000000] * 100000 }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ 'a'.zfill(2000000000) }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%2000000000d' | format(1) }}",
        "{{ '%*d' | format(2000000000, 1) }}",
        "{{ '{:>2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ ('\n' * 1000000) | indent(10000, true, true) }}",
        "{{ ([1] * 100000) | tojson(indent=10000) }}",
        "{{ ('\t' * 1000000).expandtabs(10000) }}",
        "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + " + 1" * 20000 + " }}",
    ],
)
def test_small_programs_that_ask_for_much(source):
    """Refused before the memory is taken: the limit of the address space is far below what they ask for."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, limits[1]))
    try:
        assert "MemoryError" not in refusal(source)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_slow_program_is_ended(monkeypatch):
    from llmkit.frontend import template_sandbox

    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    source = "{% set x = range(99999) | list %}{% for i in range(99999) %}{% if 5.5 in x %}{% endif %}{% endfor %}"
    assert "longer than 0.05 seconds" in refusal(source)


def test_long_chats_are_no_bombs():
    chat = [{"role": "user", "content": "word " * 20_000}] * 100
    built = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content[:500] %}{% endfor %}"
    assert len(render(CHATML, chat)) > 100 * 100_000
    assert len(render(built + "{{ ns.x }}", chat)) == 50_000
