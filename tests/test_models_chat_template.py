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
    ],
)
def test_faulty_template_is_refused(template, message):
    with pytest.raises(ValueError, match=message):
        chat_template.render(HELLO, template)


@pytest.mark.parametrize("messages", [["Hello"], [{"content": "Hello"}], [*HELLO, None]])
def test_message_without_role_is_refused(messages):
    with pytest.raises(ValueError, match=r"messages\[.\]: expected a mapping with role"):
        chat_template.render(messages, "{{ messages }}")
