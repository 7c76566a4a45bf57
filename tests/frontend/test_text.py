"""The text side of a model's folder: stop tokens from everywhere (bug 16), templates, no silent cutting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import ModelFolderUnusable, ModelText, load_model_text
from tests.support.frontend import byte_tokenizer, metaspace_tokenizer, tokens_of

MakeFolder = Callable[..., Path]
USER = [ChatMessage("user", "hi")]


@pytest.fixture
def folder(tmp_path: Path) -> MakeFolder:
    """folder(**files): a model's folder; `config={...}` becomes config.json, `chat_template="…"` the .jinja file."""

    def make(**files: Any) -> Path:
        byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / f"{name}.jinja").write_text(content)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def chat(text: ModelText) -> str:
    tokens = text.encode_chat(USER, {}, 0.0)
    detokenizer = text.detokenizer()
    return "".join([*(detokenizer.push(token) for token in tokens), detokenizer.finish()])


@pytest.mark.parametrize(
    ("files", "stop"),
    [
        ({"config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": [9, 8]}}, (8, 9)),
        ({"config": {"eos_token_id": [7, 5]}, "tokenizer_config": {"eos_token": "</s>"}}, (1, 5, 7)),
        ({"tokenizer_config": {"eos_token": {"content": "<s>", "lstrip": False}}}, (0,)),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {}}, (1,)),
        ({"config": {"eos_token_id": None}}, ()),
        ({}, ()),
    ],
)
def test_stop_tokens_are_the_union(folder: MakeFolder, files: dict[str, Any], stop: tuple[int, ...]) -> None:
    assert load_model_text("m", folder(**files)).stop == stop


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": "A{{ messages[0].content }}"},
        {"chat_template": "A{{ messages[0].content }}", "tokenizer_config": {"chat_template": "other"}},
        {"tokenizer_config": {"chat_template": "A{{ messages[0].content }}"}},
        {
            "tokenizer_config": {
                "chat_template": [
                    {"name": "tool_use", "template": "other"},
                    {"name": "default", "template": "A{{ messages[0].content }}"},
                ]
            }
        },
    ],
)
def test_where_templates_are_found(folder: MakeFolder, files: dict[str, Any]) -> None:
    assert chat(load_model_text("m", folder(**files))) == "Ahi"


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "B{{ messages[0].content }}"}))
    assert chat(load_model_text("m", tmp_path)) == "Bhi"


def test_without_a_template_there_is_none(folder: MakeFolder) -> None:
    assert load_model_text("m", folder()).template is None


def test_only_bare_prompts_get_the_tokenizers_additions() -> None:
    """A template writes its own <s>; with the tokenizer's there would be two."""
    from tokenizers import processors

    from sdcpd.frontend.chat_template import ChatTemplate

    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    text = ModelText("m", tokenizer, stop=(), template=template)
    assert text.encode("hi") == (0, *tokens_of("hi"))
    assert text.encode_chat(USER, {}, 0.0) == (0, *tokens_of("hi"))


def test_the_tokenizers_own_truncation_and_padding_are_off() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    assert ModelText("m", tokenizer, stop=()).encode("hello") == tokens_of("hello")


def test_a_continuation_keeps_its_space() -> None:
    text = ModelText("m", metaspace_tokenizer(), stop=())
    detokenizer = text.detokenizer(after=text.encode("a"))
    world = metaspace_tokenizer().token_to_id("▁world")
    assert world is not None
    assert detokenizer.push(world) == " world"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{}", "not a readable tokenizer"),
        ("tokenizer_config.json", "[", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"eos_token_id": "2"}', "eos_token_id"),
        ("config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("tokenizer_config.json", '{"eos_token": "<gone>"}', "<gone>"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(folder: MakeFolder, file: str, content: str, words: str) -> None:
    path = folder()
    (path / file).write_text(content)
    with pytest.raises(ModelFolderUnusable, match=words):
        load_model_text("m", path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderUnusable, match=r"tokenizer\.json"):
        load_model_text("m", tmp_path)


@pytest.mark.model
def test_the_demo_model_reads_as_transformers_reads_it(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_model_text("m", demo_model)
    theirs = AutoTokenizer.from_pretrained(demo_model)
    messages = [ChatMessage("user", "Was ist 2+2? 🌍"), ChatMessage("assistant", "4"), ChatMessage("user", "Danke")]
    wanted = theirs.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(ours.encode_chat(messages, {}, 0.0)) == wanted
    assert list(ours.encode("Once upon a time")) == theirs("Once upon a time").input_ids
    assert ours.stop == (2,)
