"""README.md is run: its commands exist, their flags are known, its requests are accepted, its links lead somewhere."""

import importlib
import os
import re
import shlex
from pathlib import Path

import pytest

from sdcpd.frontend.openai import read_chat
from sdcpd.node import ctl, main, quickstart
from sdcpd.node.config import load_config
from sdcpd.node.toml_reader import setting_names
from tests.sim import simulate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()
]

MODELS = {
    "router": 'frontend.models=[{ name = "m", path = "FOLDER" }]',
    "verifier": "engine.model=FOLDER",
    "drafter": "drafter.tokenizer=FOLDER",
}
"""The files of single roles name a folder that this machine need not have."""


def test_there_are_commands() -> None:
    assert "scripts/quickstart" in COMMANDS
    assert "scripts/test" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_as_the_programs_have_them(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    match program:
        case "scripts/quickstart":
            quickstart.parser().parse_args(arguments)
        case "scripts/test" | "scripts/check":
            assert not arguments
        case "scripts/bench":
            if arguments:
                importlib.import_module(f"tests.bench.{arguments[0]}").parser().parse_args(arguments[1:])
        case "scripts/simulate":
            simulate.parser().parse_args(arguments)
        case "sdcpd":
            options = main.parser().parse_args(arguments)
            (tmp_path / "config.json").write_text("{}")
            overrides = [re.sub(r"/path/to/(folder|small)", str(tmp_path), text) for text in options.set]
            overrides += MODELS.get(Path(options.config).stem, "").replace("FOLDER", str(tmp_path)).splitlines()
            load_config(ROOT / options.config, overrides, options.role)
        case "sdcpctl":
            ctl.parser().parse_args(arguments)
        case "curl":
            if "-d" in arguments:
                ask = read_chat(arguments[arguments.index("-d") + 1].encode())
                assert ask.stream
        case _:
            pytest.fail(f"unknown program {program}")
    if "/" in program:
        assert os.access(ROOT / program, os.X_OK)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_folders_named_exist() -> None:
    for folder in re.findall(r"`(sdcpd/\w+/)`", README):
        assert (ROOT / folder).is_dir(), folder


def test_settings_named_exist() -> None:
    from sdcpd.node.config import Config

    sections = "node|log|sdcp|tls|peers|router|frontend|engine|verifier|drafter|cache"
    known = set(setting_names(Config))
    known |= {name.rpartition(".")[0] for name in known}  # tables
    for name in re.findall(rf"\b((?:{sections})(?:\.(?!toml\b)\w+)+)\b", README):
        assert name in known, name


def test_the_changelog_has_a_place_for_the_next_change() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog
