"""The command line: ``dinomamba fit|validate|test|predict -c base.yaml -c task/….yaml -c data/… -c backbone/…``.

Light, so that help, version and a mistyped command answer at once: what trains is imported when a command runs.
"""

import difflib
import importlib.metadata
import os
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

try:
    import common  # noqa: F401  # first: no file of somebody else's is in the place of a package
    import configs
    from common.pipes import end_with_the_reader
except ImportError as error:
    sys.exit(f"error: {error}")

COMMANDS = {
    "fit": "train: pretraining, supervised training, the heads of a probe",
    "validate": "evaluate on the validation split: k-NN, Binary-AUC, ranks, robustness sets, a trained probe",
    "test": "the same on a held-out split: --data.val_shards names it",
    "predict": "embeddings and maps of every image, into the run's folder",
}
TOOLS = {
    "prepare": ("datamodules.prepare", "write shards of folders of images, of ImageNet-S, of the embedded data"),
    "weights": ("backbones.weights", "what a file of weights holds; convert it, to ONNX too"),
    "pictures": ("analysis.pictures", "a prediction's images beside their maps"),
    "ranks": ("analysis.rank", "ranks of token-mixing matrices of runs, drawn"),
    "experiments": ("experiments", "the paper's tables and figures, as make starts them"),
}
"""Programs of their own, each ``python -m MODULE`` too."""
EXAMPLE = """\
  dinomamba fit -c base.yaml -c task/dino.yaml -c data/imagenet.yaml -c backbone/vim_small.yaml \\
      --data.root /data/imagenet --trainer.logger.name vim_small"""


def description(name: str) -> str:
    """The first line of a configuration's leading comment."""
    found = re.match(r"#\s*(.*)", (configs.ROOT / name).read_text(encoding="utf-8"))
    return textwrap.shorten(found[1], 88, placeholder=" …") if found else ""


def help_text() -> str:
    """What there is to run, and on what."""
    lines = [
        "usage: dinomamba COMMAND -c base.yaml -c task/… -c data/… -c backbone/… [-c yours.yaml] [--key value …]",
        "",
    ]
    lines += [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    lines += ["", "programs beside (dinomamba NAME --help, the same as python -m MODULE):"]
    lines += [f"  {name:<12} {text} ({module})" for name, (module, text) in TOOLS.items()]
    for folder, title in (("task", "tasks"), ("data", "data"), ("cluster", "clusters")):
        names = configs.names(folder)
        width = max(map(len, names))
        lines += ["", f"{title} (-c {folder}/NAME.yaml):"]
        lines += [f"  {name:<{width}}  {description(f'{folder}/{name}.yaml')}".rstrip() for name in names]
    names = textwrap.wrap(" ".join(configs.names("backbone")), 100, initial_indent="  ", subsequent_indent="  ")
    lines += ["", "backbones (-c backbone/NAME.yaml):", *names]
    lines += [
        "", "example:", EXAMPLE, "",
        "Files are looked for in the working folder, then among those of the program; later ones win, and flags win",
        "over files. dinomamba COMMAND --help lists every option, --print_config what the files make together.",
    ]  # fmt: skip
    return "\n".join(lines)


def refuse(message: str) -> NoReturn:
    sys.stderr.write(f"see dinomamba --help\nerror: {message}\n")
    sys.exit(2)


def with_found_configs(args: list[str]) -> list[str]:
    """The arguments with the files behind ``-c`` and ``--config`` found by :func:`configs.find`."""
    found, named = [], False
    for arg in args:
        if named:
            arg = str(configs.find(arg))
        elif arg.startswith("--config="):
            arg = f"--config={configs.find(arg.removeprefix('--config='))}"
        named = arg in ("-c", "--config") and not named
        found.append(arg)
    return found


def main(args: list[str] | None = None) -> None:
    """Runs one command, the process's own or ``args``.

    Wrong input ends with exit code 1 or 2 and a last line that says what to change.
    """
    own = args is None
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help", "help"):
        end_with_the_reader()
        print(help_text())
        sys.exit(0 if args else 2)
    if args[0] in ("--version", "version"):
        print(f"dinomamba {importlib.metadata.version('dinomamba')}")
        sys.exit(0)
    if args[0] in TOOLS:
        sys.argv[:] = [f"dinomamba {args[0]}", *args[1:]]
        runpy.run_module(TOOLS[args[0]][0], run_name="__main__")
        return
    command = next((arg for arg in args if not arg.startswith("-")), args[0])
    if args[0] not in COMMANDS:
        known = [*COMMANDS, *TOOLS]
        near = difflib.get_close_matches(command, known, 1, 0.65)
        meant = f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(known)}"
        refuse(f"{args[0]!r} is no command{meant}")
    share_the_processors()
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # what Apple's devices lack runs on the CPU
    try:
        import lightning_cli
    except ImportError as error:
        refuse(reason_of_import(error))
    # a user's own classes lie in the working folder; behind ours, so that no file of theirs takes the place of one
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())

    args = with_found_configs(args)
    if own:
        sys.argv[1:] = args
    lightning_cli.run(None if own else args)


def reason_of_import(error: ImportError) -> str:
    """What kept the program from being imported, and the user's file that took a package's place, if one did."""
    folders = {
        Path(place or ".").resolve() for place in (os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    }
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." in name or file is None or configs.ROOT.parent in Path(file).resolve().parents:
            continue
        path = Path(file).resolve()
        if path.parent in folders or (path.name == "__init__.py" and path.parent.parent in folders):
            return f"{error}; {file} takes the place of the package {name!r}: rename it, or start from another folder"
    return str(error)


def share_the_processors() -> None:
    """Threads that wait for each other spin briefly and then sleep; read when OpenMP starts, so before torch.

    Beside other work a spinning thread takes the processor from the very one it waits for. Not to spin at all costs a
    small step some 20 % where there is no other work; benchmarks/busy_processors.py has the figures.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    main()
