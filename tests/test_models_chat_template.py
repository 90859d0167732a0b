"""Chat templates: what models ask for, and what the sandbox refuses."""

from __future__ import annotations

import datetime

import pytest

from jaxstate.models import chat_template

HELLO = [{"role": "user", "content": "Hello"}]


def test_smollm2_prompt(smollm2_model):
    template = smollm2_model.tokenizer.chat_template
    assert chat_template.render(HELLO, template) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "Hi"},
    ]
    assert chat_template.render(messages, template, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{{ tools | tojson }}", '[{"name": "größe <b>"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}", "1\n"),
        ("{{ missing }}", ""),
        ("{% if documents is none and tools is not none %}x{% endif %}", "x"),
        (
            "{{ tools[0].name }}{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}",
            "größe <b>a",
        ),
    ],
)
def test_template_finds_what_hugging_face_offers(template, expected):
    text = chat_template.render(
        HELLO,
        template,
        bos_token="<s>",
        eos_token="</s>",
        now=datetime.datetime(2026, 1, 2),
        tools=[{"name": "größe <b>"}],
    )
    assert text == expected


def test_time_is_now_unless_given():
    year = datetime.datetime.now().year
    assert int(chat_template.render(HELLO, "{{ strftime_now('%Y') }}")) in (year, year + 1)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template: expected messages that it accepts, got an error"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{{ messages.__class__.__mro__ }}", "attribute '__class__' .* is unsafe"),
        ("{{ missing.attribute.deeper }}", "is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{% include 'other' %}", "got an error"),
        ("a\n{% for %}", r"got an error \(Expected .*, line 2\); change"),
        ("{% generation %}a", r"line 1\); change"),
        ("{{ strftime_now('\\ud800') }}", "surrogates not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_faulty_template_is_refused(template, message):
    with pytest.raises(ValueError, match=message):
        chat_template.render(HELLO, template)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ bos_token }}", "expected a user's message in what it renders"),
        ("{% for %}", r"expected one that renders a user's message, got an error \(Expected"),
        ("{{ raise_exception('no') }}", r"got an error \(no\); fetch the model again"),
    ],
)
def test_template_that_no_chat_can_use_is_refused(template, message):
    with pytest.raises(ValueError, match=message) as raised:
        chat_template.check(template)
    assert "\n" not in str(raised.value)


def test_template_that_renders_a_message_passes():
    chat_template.check("{{ bos_token }}{{ messages[0].content | upper | lower }}", bos_token="<s>")


def test_raw_text_takes_text_only():
    assert chat_template.raw_text([*HELLO, *HELLO]) == "Hello\n\nHello"
    with pytest.raises(ValueError, match=r"messages\[0\]: expected a text as content, got \["):
        chat_template.raw_text([{"role": "user", "content": ["Hello"]}])


@pytest.mark.parametrize("messages", [["Hello"], [{"content": "Hello"}], [*HELLO, None]])
def test_message_without_role_is_refused(messages):
    with pytest.raises(ValueError, match=r"messages\[.\]: expected a mapping with role"):
        chat_template.render(messages, "{{ messages }}")
