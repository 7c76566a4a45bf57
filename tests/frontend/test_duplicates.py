"""Keys that stand twice are found at any depth and named by their path."""

import pytest

from sdcpd.frontend.duplicates import refuse_duplicates
from sdcpd.frontend.errors import ApiError
from sdcpd.frontend.openai import read_chat

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (CHAT + b',"model":"m"}', "model"),
        (CHAT + b',"mod\\u0065l":"n"}', "model"),
        (
            CHAT + b',"stream":true,"stream_options":{"include_usage":true,"include_usage":true}}',
            "stream_options.include_usage",
        ),
        (CHAT + b',"chat_template_kwargs":{"a":[1,{"b":[{"c":1,"c":1}]}]}}', "chat_template_kwargs.a[1].b[0].c"),
        (
            b'{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"user","role":"system","content":""}]}',
            "messages[1].role",
        ),
        (CHAT + b',"metadata":{"":"a","":"b"}}', "metadata."),
    ],
)
def test_a_key_that_stands_twice_is_named(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "duplicate_key")
    assert param in caught.value.message


def test_an_outer_key_comes_first_and_a_long_one_is_cut() -> None:
    with pytest.raises(ApiError) as caught:
        refuse_duplicates(b'{"a":{"b":1,"b":2},"c":3,"c":4}')
    assert caught.value.param == "c"
    with pytest.raises(ApiError) as caught:
        refuse_duplicates(b'{"%b":1,"%b":2}' % (b"x" * 1000, b"x" * 1000))
    assert caught.value.param == "x" * 128


def test_the_same_key_in_different_objects_is_none() -> None:
    message = b'{"role":"user","content":"hi"}'
    body = b'{"model":"m","messages":[%b,%b],"chat_template_kwargs":{"model":{"model":1}}}' % (message, message)
    assert read_chat(body).model == "m"


def test_what_is_beyond_this_reader() -> None:
    """Depth, and numbers of any length: an answer, never a fault."""
    with pytest.raises(ApiError) as caught:
        refuse_duplicates(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert caught.value.status == 400
    refuse_duplicates(b'{"a":[%b]}' % (b"9" * 10_000))
