"""The last line of a command that failed: what to change, out of what others' exceptions say."""

import difflib
import errno
import inspect
import re
import sys
from typing import Any, NoReturn

import yaml


class OneLine:
    """Mixed into a parser of jsonargparse: it ends with one line that says what to change, after a hint, and takes no
    name for another."""

    hint = "see --help"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)  # type: ignore[misc]
        text = explain(" ".join(line.strip() for line in str(message).splitlines() if line.strip()))
        sys.stderr.write(f"{self.hint}\nerror: {text}\n")
        sys.exit(2)


def explain(message: str) -> str:
    """jsonargparse's message cut to what is wrong and what to change."""
    if (wanted := _wanted(message) or _of_union(message) or _of_class(message)) is not None:
        return wanted
    keys = re.findall(r'[Pp]arser key "([\w.]+)"', message)
    *_, innermost = message.split("Problem with given class_path ")
    problem = re.match(r"'([\w.]+)': (.+?)(?: - Expected a | Given value type|$)", innermost)
    if problem:
        message = f"{'.'.join(keys)} ({problem[1]}): {problem[2]}".strip()
        if problem[1] in ("lightning.LightningModule", "lightning.LightningDataModule"):
            kind = "model" if problem[1].endswith("LightningModule") else "data"
            return (
                f"{kind}: arguments stand before any class_path; files apply in their order, so name the task first "
                "(-c task/dino.yaml), or give the class_path where the arguments are"
            )
        option = re.search(r"Option '([\w.]+)' is not accepted", problem[2])
        if option:
            message += _nearest(problem[1], option[1])
    if "backbone" in message and "required" in message:
        message += "; add a backbone overlay, such as -c configs/backbone/vim_small.yaml"
    elif "required: root" in message:
        message += "; set data.init_args.root to the folder with the shards, or add -c configs/data/imagenet.yaml"
    return message


def _wanted(message: str) -> str | None:
    """A value of the wrong type, by its whole key, with what is allowed."""
    keys = ".".join(re.findall(r'[Pp]arser key "([\w.]+)"', message))
    if "is abstract" in message and (found := re.search(r"NestedArg\(key='([\w.]+)'", message)):
        return (
            f"{keys}.init_args.{found[1]}: nothing says yet which class {keys} is; files apply in their order, so put "
            f"-c base.yaml first, or give {keys}.class_path before it"
        )
    found = re.fullmatch(
        r'Parser key "[\w.]+": Does not validate .*? Errors: - (.*) Given value type: .*? Given value:\s?(.*)', message
    )
    if found and all(text.startswith("Expected a") for text in found[1].split(" - ")):
        return f"{keys}={found[2] or repr('')}; allowed: {_types(found[1])}"
    found = re.search(
        r'Parser key "[\w.]+": (Expected an? (?:<class|typing\.).+?)\. Got value:(.*?)(?: - Expected |$)', message
    )
    if found:
        return f"{keys}={found[2].strip() or repr('')}; allowed: {_types(found[1])}"
    if "Expected a path but  either not accessible" in message:
        return f"{keys} is empty; wanted class_path and init_args, or a file that holds them"
    found = re.search(
        r'Parser key "\w+": - Expected a path but (.+?) either not accessible or invalid - '
        r"(.+?)(?: - Expected a <|$)",
        message,
    )
    return None if found is None else f"{keys} ({found[1]}): neither a file nor a class: {found[2]}"


def _of_union(message: str) -> str | None:
    """A value that is of none of an option's types, at any depth, where nothing but the type is wrong with it."""
    keys = ".".join(re.findall(r'[Pp]arser key "([\w.]+)"', message))
    *_, innermost = re.split(r"Does not validate against any of the Union subtypes Subtypes: ", message)
    found = re.match(
        r"\[(.*?)\] Errors: (.*?) Given value type: .*? Given value:\s?(.*?)(?: - Expected a |$)", innermost
    )
    if found is None or not all(text.startswith("Expected a") for text in found[2].removeprefix("- ").split(" - ")):
        return None
    return f"{keys}={found[3] or repr('')}; allowed: {_types(found[1])}"


def _of_class(message: str) -> str | None:
    """A class that is not of the kind that its place asks for."""
    keys = ".".join(re.findall(r'[Pp]arser key "([\w.]+)"', message))
    found = re.search(r"Import path (\S+) does not correspond to a subclass of (\w+)", message)
    if found is None:
        return None
    place = {
        "LightningModule": "a method or evaluation, such as lightning_modules.DINO (-c task/dino.yaml); a backbone "
        "stands under model.init_args.backbone",
        "LightningDataModule": "one such as datamodules.ImageNetDataModule (-c data/imagenet.yaml)",
    }.get(found[2], f"a subclass of {found[2]}")
    return f"{keys}.class_path={found[1]} is no {found[2]}; wanted {place}"


def _types(text: str) -> str:
    """Types as people say them."""
    text = re.sub(r"tuple\[(\w+), \.\.\.\]|list\[(\w+)\]", lambda m: f"a list of {m[1] or m[2]}", text)
    text = re.sub(
        r"tuple\[(\w+(?:, \w+)*)\]", lambda m: f"a list of {len(m[1].split(', '))} {m[1].split(', ')[0]}", text
    )
    text = re.sub(r"Expected an? | - |typing\.", lambda part: ", " if part[0] == " - " else "", text)
    text = re.sub(r"Literal\[(.*?)\]", r"\1", text).replace("'", "")
    return re.sub(r"<class (\w+)>", r"\1", text).replace("NoneType", "null")


ADDRESS = "    For further information visit"
"""Pydantic's last line."""


def reason_of(message: str) -> str:
    """The line of an error's message that says why.

    jsonargparse lists what each type of a union objects to, ours among it, and ends with the value; others end with the
    reason.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(ADDRESS)]
    objections = [
        f"{line.removeprefix('- ')} {after}" if line.endswith(":") else line.removeprefix("- ")
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("- ")
    ]
    objections = [line for line in objections if not line.startswith("Expected a ")]
    if "Does not validate against any of the Union subtypes" in message and objections:
        return objections[-1]
    return lines[-1] if lines else ""


def _nearest(class_path: str, option: str) -> str:
    """Which argument of a class was probably meant."""
    module, _, name = class_path.rpartition(".")
    known = list(inspect.signature(getattr(sys.modules[module], name)).parameters) if module in sys.modules else []
    near = difflib.get_close_matches(option, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(known)}"


ADVICE = {
    r"Bus error|out of shared memory|unable to (write to|allocate shared memory|open shared memory)|/dev/shm": (
        "the shared memory of the loading processes is full: make /dev/shm larger (docker run --shm-size 16g), or "
        "lower data.init_args.num_workers and data.init_args.prefetch"
    ),
    r"DataLoader worker .*(exited unexpectedly|killed by signal)": (
        "a loading process was ended from outside, most often as memory ran out: lower data.init_args.num_workers, "
        "prefetch or batch_size"
    ),
    r"No supported gpu backend|can ?not run on your system since the accelerator is not available": (
        "trainer.accelerator asks for a device that torch does not find here: take auto or cpu"
    ),
    r"You requested to check .* of the `\w+_dataloader`": (
        "trainer.limit_train_batches, limit_val_batches, limit_test_batches or overfit_batches leaves less than one "
        "batch: raise it"
    ),
    r"out of memory|can't allocate memory|Unable to allocate": (
        "memory is full: lower data.init_args.batch_size, or raise trainer.accumulate_grad_batches, or set "
        "model.init_args.grad_checkpointing true where the method has it"
    ),
}
"""What to change, by what torch and Lightning say."""


def advice(error: BaseException) -> str:
    """One line of an error that is none of ours: its reason, and what to change where that is known."""
    reason = f"{type(error).__name__}: {reason_of(str(error))}".removeprefix("MisconfigurationException: ")
    known = next(
        (text for pattern, text in ADVICE.items() if re.search(pattern, f"{type(error).__name__} {error}")), None
    )
    return reason if known is None else f"{known} ({reason})"


def origin(error: BaseException) -> BaseException:
    """The error that ended a run, where Lightning's clean-up after it failed too."""
    while "iter(combined_loader)" in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def last_line(error: BaseException) -> str:
    """What to change, in one line."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error}); make room and go on with --ckpt_path auto"
    if isinstance(error, ValueError | FloatingPointError | OSError | yaml.YAMLError):
        return reason_of(str(error)) or type(error).__name__
    return advice(error)
