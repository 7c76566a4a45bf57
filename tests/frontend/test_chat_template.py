"""Chat templates: what model folders expect around them, and that bad messages are the caller's fault."""

import pytest

from sdcpd.frontend.chat_template import ChatMessage, ChatRefused, ChatTemplate, TemplateUnusable

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")]
NOON = 1_764_590_400.0  # 2025-12-01 12:00 UTC


def render(source: str, messages: list[ChatMessage] | None = None, **variables: object) -> str:
    return ChatTemplate(source, SPECIAL).render(HELLO if messages is None else messages, variables, NOON)


def test_messages_special_tokens_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message['role'] != 'system' %}\n"
        "[{{ message.role }}] {{ message['content'] }}{{ eos_token }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source) == "<s>[user] Hello</s>\n[assistant]"  # blocks leave no line of their own


def test_loop_controls_and_the_generation_mark() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert render(source) == "Hello"


def test_json_is_not_escaped_for_web_pages() -> None:
    assert render("{{ {'a': '<é&>'} | tojson }}") == '{"a": "<é&>"}'
    assert render("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"


def test_the_date_is_the_callers_clock_in_utc() -> None:
    assert render("{{ strftime_now('%Y-%m-%d %H:%M') }}") == "2025-12-01 12:00"


def test_callers_variables_cannot_replace_ours() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ messages | length }}{{ bos_token }}", SPECIAL)
    variables = {"enable_thinking": False, "messages": [], "bos_token": "x"}
    assert template.render(HELLO, variables, NOON) == "False2<s>"
    assert template.reserves("messages")
    assert template.reserves("bos_token")
    assert not template.reserves("enable_thinking")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "messages"),
        ("{{ messages + 1 }}", "messages"),
        ("{{ 1 // (messages | length - 2) }}", "messages"),
        ("{{ messages[0].__class__.__mro__ }}", "messages"),  # the sandbox
        ("{% set _ = messages.append(1) %}", "messages"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurses"),
        ("{{ nobody_sets_this.x }}", "messages"),
    ],
)
def test_what_a_template_refuses_is_the_callers_to_mend(source: str, words: str) -> None:
    with pytest.raises(ChatRefused, match=words):
        render(source)


def test_a_broken_template_is_found_when_it_is_read() -> None:
    with pytest.raises(TemplateUnusable):
        ChatTemplate("{% for m in messages %}", SPECIAL)
