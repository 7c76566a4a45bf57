"""`scripts/bench NAME [--json] [options]`; without a name, the list of benches."""

import importlib
import pkgutil
import sys
from typing import Final

import tests.bench

NOT_BENCHES: Final = ("figures", "passes", "prompts", "decoding", "decode_figures", "charts", "tiers", "__main__")


def benches() -> dict[str, str]:
    """Name and first line of each bench: the modules here that have a `main` (and its `parser`)."""
    found = {}
    for module in pkgutil.iter_modules(tests.bench.__path__):
        if module.name in NOT_BENCHES or module.name.startswith("test_") or module.name.endswith("_node"):
            continue
        text = importlib.import_module(f"tests.bench.{module.name}").__doc__ or ""
        found[module.name] = text.splitlines()[0]
    return found


def main(arguments: list[str]) -> int:
    """Run one bench with its options; 2 for a name that is none."""
    known = benches()
    name = arguments[0] if arguments else "--list"
    if name in known:
        importlib.import_module(f"tests.bench.{name}").main(arguments[1:])
        return 0
    asked = name in ("--list", "--help", "-h")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        print(f"no bench is called {name!r}; there are:\n", file=out)
    print("scripts/bench NAME [--json] [options]    (NAME --help says more)\n", file=out)
    for known_name, text in known.items():
        print(f"  {known_name:<12} {text}", file=out)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
