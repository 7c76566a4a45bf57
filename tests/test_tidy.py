"""Style as a test: what reviewers would otherwise have to look for in every change.

Lengths, docstrings, and the calls that each floor does without. The import rules of the floors are import-linter's
(pyproject.toml); here it is about what the standard library offers everywhere: time, randomness, threads, printing.
"""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sdcpd"
FILE_LINES_LIMIT = 500
FUNCTION_LINES_LIMIT = 70

FLOORS = {"protocol": 0, "cache": 1, "engine": 2, "drafting": 3, "roles": 4, "edge": 5, "frontend": 5, "node": 6}

CORE_BANNED_MODULES = {
    "datetime": "a clock; `now` is an argument",
    "logging": "floors 0 to 3 return facts; roles log them",
    "random": "draws are arguments",
    "secrets": "draws are arguments",
    "structlog": "floors 0 to 3 return facts; roles log them",
    "threading": "the Workers port decides where a function runs",
    "time": "a clock; `now` is an argument",
    "trio": "nothing below roles/ suspends",
    "uuid": "draws are arguments",
}
ROLES_BANNED_MODULES = {
    name: reason for name, reason in CORE_BANNED_MODULES.items() if name not in ("structlog", "trio")
}
ROLES_BANNED_CALLS = {
    "trio.sleep": "ports.clock.sleep_until",
    "trio.sleep_until": "ports.clock.sleep_until",
    "trio.current_time": "ports.clock.now",
    "trio.to_thread": "ports.workers.run",
    "trio.run": "node/main.py",
}
PORTS_ONLY = {
    "os.urandom": "the Randomness port",
    "time.monotonic": "the Clock port",
    "trio.to_thread.run_sync": "the Workers port",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def floor_of(path: Path) -> int:
    return FLOORS.get(path.relative_to(PACKAGE).parts[0], 0)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{dotted(value)}.{attribute}"
        case _:
            return "?"


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def files_and_functions_are_short(path: Path, tree: ast.Module) -> Iterator[str]:
    lines = len(path.read_text().splitlines())
    if lines > FILE_LINES_LIMIT:
        yield f"1: {lines} lines, a sign of two nouns"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES_LIMIT:
                yield f"{node.lineno}: {node.name} has {length} lines"


def what_is_public_is_explained(path: Path, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree) and path.stat().st_size:
        yield "1: the module says nothing"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            protocol = isinstance(node, ast.ClassDef) and any(dotted(base) == "Protocol" for base in node.bases)
            if not ast.get_docstring(node) and not protocol:
                yield f"{node.lineno}: {node.name} has no docstring"


def modules_banned_on_a_floor(path: Path, tree: ast.Module) -> Iterator[str]:
    floor = floor_of(path)
    banned = CORE_BANNED_MODULES if floor < 4 else ROLES_BANNED_MODULES if floor == 4 else {}
    for line, module in imports(tree):
        if module.split(".")[0] in banned:
            yield f"{line}: {module} ({banned[module.split('.')[0]]})"


def calls_banned_on_a_floor(path: Path, tree: ast.Module) -> Iterator[str]:
    floor = floor_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if floor == 4 and name in ROLES_BANNED_CALLS:
                yield f"{node.lineno}: {name}; use {ROLES_BANNED_CALLS[name]}"
            if floor < 6 and name in PORTS_ONLY:
                yield f"{node.lineno}: {name}; use {PORTS_ONLY[name]}"
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)) and floor < 4:
            yield f"{node.lineno}: nothing below roles/ suspends"
        if isinstance(node, ast.Call) and dotted(node.func) == "print" and floor < 6:
            yield f"{node.lineno}: print"


def no_bare_catch_below_the_node(path: Path, tree: ast.Module) -> Iterator[str]:
    """Style rule 7: foreign exceptions are mapped by name at the border; what is left is ours and ends the node."""
    if floor_of(path) == 6:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and (
            node.type is None or dotted(node.type) in ("Exception", "BaseException")
        ):
            last = node.body[-1]
            if not isinstance(last, ast.Raise):
                yield f"{node.lineno}: catches everything and does not raise at its end"


def no_order_from_a_set(_: Path, tree: ast.Module) -> Iterator[str]:
    """A set written down where it is walked has an order that changes from process to process."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            named = isinstance(node.iter, ast.Call) and dotted(node.iter.func) in ("set", "frozenset")
            if named or isinstance(node.iter, (ast.Set, ast.SetComp)):
                yield f"{node.iter.lineno}: walks a set; sort it"


def no_state_in_modules(_: Path, tree: ast.Module) -> Iterator[str]:
    """No `global`, no mutable default. A module-level container is a table: annotated Final, or named in capitals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            if any(isinstance(default, (ast.List, ast.Dict, ast.Set)) for default in defaults):
                yield f"{node.lineno}: mutable default"
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.List, ast.Dict, ast.Set)):
            for target in statement.targets:
                if isinstance(target, ast.Name) and not target.id.isupper() and target.id != "__all__":
                    yield f"{statement.lineno}: {target.id} is a container that anybody may change"


@pytest.mark.parametrize(
    "rule",
    [
        files_and_functions_are_short,
        what_is_public_is_explained,
        modules_banned_on_a_floor,
        calls_banned_on_a_floor,
        no_bare_catch_below_the_node,
        no_order_from_a_set,
        no_state_in_modules,
    ],
)
def test_sources(rule: Callable[[Path, ast.Module], Iterator[str]]) -> None:
    offences = [f"{name_of(path)}:{offence}" for path in sources() for offence in rule(path, parse(path))]
    assert not offences, "\n".join(["", *offences])


@pytest.mark.parametrize(
    "script",
    [
        "scripts/env",
        "scripts/quickstart",
        "scripts/test",
        "scripts/check",
        "scripts/bench",
        "scripts/simulate",
        ".ci/run",
    ],
)
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def tracked_texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines()
    if listed.returncode != 0 or not names:  # an unpacked archive: look at what lies there
        names = [path.relative_to(ROOT).as_posix() for path in sources()]
    for name in names:
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".jpg", ".safetensors", ".gguf"):
            yield name, path.read_text("utf-8", errors="replace")


def test_no_file_names_a_machine_or_a_registry() -> None:
    """The project must not depend on where it was written; hosts of package indexes belong to pip's configuration."""
    pattern = re.compile(r"/(?:work|home|root|Users)/\w|(?:pypi|pythonhosted|download\.pytorch)\.org|huggingface\.co")
    this = Path(__file__).relative_to(ROOT).as_posix()
    found = [
        f"{name}:{number}: {match.group()}"
        for name, text in tracked_texts()
        if name != this
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(["", *found])


def test_virtual_time_is_asked_for_where_it_works() -> None:
    """pytest-trio looks for a clock among a test's own arguments only: a fixture that asks for one changes nothing."""
    lost = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any("fixture" in dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list)
        and any(argument.arg in ("autojump_clock", "mock_clock") for argument in node.args.args)
    ]
    assert not lost, lost
