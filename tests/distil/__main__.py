"""`scripts/distil`: a draft model out of a target's own outputs, on a CPU, in three steps.

    scripts/distil texts    --folder WORK --prompts FOLDER     the target writes; WORK/texts grows by shards
    scripts/distil train    --folder WORK --layers 0,29        WORK/NAME/checkpoint.pt, then the drafter in WORK/NAME
    scripts/distil evaluate --folder WORK --prompts FOLDER     agreement by family, on prompts that were held out

Each step can be interrupted and run again: it goes on where it was. `--prompts` holds files of JSON lines with a
`prompt` each, a file a family. What was tried and what it was worth stands in tests/bench/README.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sdcpd.engine.forward import Engine
from sdcpd.engine.model_config import ModelRefused, read_model_config
from sdcpd.engine.settings import EngineSettings
from sdcpd.frontend.text import load_model_text
from tests.bench.figures import report
from tests.bench.passes import POOL_BYTES, demo_model
from tests.distil.evaluation import evaluate
from tests.distil.student import Student, frequent_tokens
from tests.distil.texts import read_texts, write_shards
from tests.distil.training import train


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/distil", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("step", choices=("texts", "train", "evaluate"))
    result.add_argument("--folder", type=Path, required=True, help="where texts, checkpoints and drafters are kept")
    result.add_argument("--prompts", type=Path, help="a folder of JSON lines, a file a family")
    result.add_argument("--model", type=Path, help="the target (default: the demo model)")
    result.add_argument("--name", default="drafter", help="of the drafter within the folder (default: drafter)")
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    result.add_argument("--shards", type=int, default=100, help="of texts (default 100)")
    result.add_argument("--texts", type=int, default=24, help="in a shard (default 24)")
    result.add_argument("--longest", type=int, default=512, help="prompt in tokens; longer ones are left out")
    result.add_argument("--answer", type=int, default=192, help="most new tokens of a text (default 192)")
    result.add_argument("--layers", default="0,29", help="of the target, from which the drafter begins")
    result.add_argument("--head", type=int, default=8192, help="tokens that the drafter can say; 0: all")
    result.add_argument("--steps", type=int, default=2000)
    result.add_argument("--windows", type=int, default=8, help="in a step (default 8)")
    result.add_argument("--length", type=int, default=256, help="of a window (default 256)")
    result.add_argument("--rate", type=float, default=1e-3, help="highest learning rate (default 0.001)")
    result.add_argument("--every", type=int, default=25, help="steps between checkpoints (default 25)")
    result.add_argument("--each", type=int, default=4, help="prompts of a family to evaluate (default 4)")
    result.add_argument("--json", action="store_true", help="one object on the last line of evaluate")
    return result


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if options.prompts is None and options.step != "train":
        parser().error(f"{options.step} needs --prompts")
    torch.set_num_threads(options.threads)
    target = options.model or demo_model()
    try:
        match options.step:
            case "texts":
                _texts(options, target)
            case "train":
                _train(options, target)
            case _:
                _evaluate(options, target)
    except (ModelRefused, FileNotFoundError, ValueError) as error:
        print(f"scripts/distil: {error}", file=sys.stderr)
        return 1
    return 0


def _texts(options: argparse.Namespace, target: Path) -> None:
    write_shards(
        options.folder / "texts",
        _engine(target, options.threads),
        load_model_text("target", target),
        options.prompts,
        shards=options.shards,
        texts=options.texts,
        longest=options.longest,
        answer=options.answer,
    )


def _train(options: argparse.Namespace, target: Path) -> None:
    texts = read_texts(options.folder / "texts")
    config = read_model_config(target)
    always = load_model_text("target", target).stop
    layers = tuple(int(number) for number in options.layers.split(","))
    folder = options.folder / options.name
    student = Student(target, config, layers, frequent_tokens(texts.best, always, config.vocabulary, options.head))
    train(
        student,
        texts,
        folder,
        steps=options.steps,
        windows=options.windows,
        length=options.length,
        rate=options.rate,
        every=options.every,
    )
    student.save(folder, target)


def _evaluate(options: argparse.Namespace, target: Path) -> None:
    drafter = options.folder / options.name
    blocks = evaluate(
        _engine(target, options.threads),
        _engine(drafter, options.threads, drafts=True),
        load_model_text("target", target),
        options.prompts,
        each=options.each,
        longest=options.longest,
        answer=options.answer,
    )
    method: dict[str, object] = {"target": target.name, "drafter": options.name, "threads": options.threads}
    report("distil", method, blocks.figures(), as_json=options.json)


def _engine(folder: Path, threads: int, *, drafts: bool = False) -> Engine:
    settings = EngineSettings(model=str(folder), kv_cache_bytes=POOL_BYTES, threads=threads)
    return Engine.load(settings, drafts=drafts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
