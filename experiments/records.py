"""What a run was made of, kept in its folder, so that another one asked for in the same folder is told.

It is the program, the verb, the flags and what the YAML files say, without comments: not what starts a run, how many
threads it has or on how many devices it runs, which change nothing of what it is (a batch is global).
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import configs
from common.files import write_json
from experiments.runs import RunSpec

NAME = "made_of.json"
WHERE = ("devices", "num_nodes", "accelerator", "strategy", "plugins", "plugins+")
"""Of the trainer: where a run is made."""
FOLDER = ("--trainer.logger.init_args.save_dir", "--trainer.logger.init_args.name")
"""Flags that only say which folder it is."""
PATHS = ("root", "backbone_weights", "probe", "ckpt_path")
"""Flags, by the last word of their name, whose value may be a file or a folder without a slash in it."""


def made_of(run: RunSpec) -> dict[str, Any]:
    """What the run is made of, as JSON holds it."""
    flags: dict[str, list[str]] = {}
    names = list(run.configs)
    for flag, value in _pairs(run.flags):
        if flag in ("-c", "--config"):
            names.append(value)
        elif flag.endswith("+"):
            flags.setdefault(flag, []).append(_path(flag, value, run.folder.parent))
        elif flag not in FOLDER and (flag, value) != ("--ckpt_path", "auto"):
            flags[flag] = [_path(flag, value, run.folder.parent)]  # the last one counts
    flags = {flag: value for flag, value in flags.items() if flag not in {f"--trainer.{key}" for key in WHERE}}
    paths = {name: path for name in names if (path := configs.find(name)).is_file()}  # what is not there the run tells
    files = {name: content for name, path in paths.items() if (content := _content(path.read_bytes()))}
    found = {
        "program": run.program,
        "verb": run.verb,
        "flags": dict(sorted(flags.items())),
        "files": files,
        "order": list(files),  # a later one counts
    }
    return json.loads(json.dumps(found, default=str))


def keep(run: RunSpec) -> None:
    """Writes it into the run's folder, whole or not at all."""
    write_json(run.folder / NAME, made_of(run))


def conflict(run: RunSpec, launch: Sequence[str] = ()) -> str:
    """What the run in the folder was made of and this one is not, where it would be used or gone on with.

    Empty where they agree, where the run is made anew, and where there is no record, as of runs of an earlier version.
    """
    path = run.folder / NAME
    if not path.is_file() or not (run.finished or (run.resumes(launch) and (run.folder / "checkpoints").is_dir())):
        return ""
    try:
        made = dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record ({error}); delete it, or the folder") from None
    if (different := _difference(made, made_of(run))) is None:
        return ""
    (kind, *inner), before, now = different
    file_or_flag, *keys = inner or [kind]
    name = f"{file_or_flag}, {'.'.join(keys)}" if keys else file_or_flag
    return (
        f"{run.folder} was made of other settings: {name}: {_show(before)}; asked for: {_show(now)}; delete the "
        "folder, or give another RUNS (--runs)"
    )


def _pairs(flags: Sequence[str]) -> list[tuple[str, str]]:
    """``--a 1 --b=2 --c`` as pairs of a flag and its value; the value of ``--c`` is empty."""
    found: list[tuple[str, str]] = []
    for word in flags:
        if word.startswith("--") or word == "-c":
            flag, _, value = word.partition("=")
            found.append((flag, value))
        elif found and not found[-1][1]:
            found[-1] = found[-1][0], word
        else:
            found.append((word, ""))
    return found


def _path(flag: str, value: str, runs: Path) -> str:
    """A file or folder by its whole path, or from the folder of the runs where it lies there; others as they are."""
    path = Path(value).expanduser()
    named = "/" in value or (flag.rpartition(".")[2].removeprefix("--") in PATHS and path.exists())
    if not named or ":" in value or value.startswith(("{", "[")):  # a URL, a command, a value in YAML
        return value
    whole, above = Path(os.path.abspath(path)), Path(os.path.abspath(runs))
    return str(Path("RUNS") / whole.relative_to(above) if whole.is_relative_to(above) else whole)


@cache
def _content(written: bytes) -> Any:
    """What a file of settings says, but for where a run is made; None where it is no YAML."""
    try:
        content = yaml.safe_load(written)
    except (ValueError, yaml.YAMLError):
        return None
    if isinstance(content, dict) and isinstance(content.get("trainer"), dict):
        trainer = {key: value for key, value in content["trainer"].items() if key not in WHERE}
        content = {key: value for key, value in content.items() if key != "trainer"} | (
            {"trainer": trainer} if trainer else {}
        )
    return content


def _difference(made: Any, asked: Any) -> tuple[list[str], Any, Any] | None:
    """Where the first value is that is unlike, by its keys, and the two values."""
    if not isinstance(made, Mapping) or not isinstance(asked, Mapping):
        return None if made == asked else ([], made, asked)
    for key in dict.fromkeys([*asked, *made]):
        if found := _difference(made.get(key), asked.get(key)):
            keys, *values = found
            return [key, *keys], *values
    return None


def _show(value: Any, most: int = 100) -> str:
    """A value in a line of an error."""
    if isinstance(value, Mapping):
        value = ", ".join(map(str, value))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = "nothing" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]} …"
