"""What is known of the splits of a run, held against each other and against the model before the first step."""

from collections.abc import Mapping

from datamodules.classes import CLASSES_FILE, differ
from datamodules.samples import Source
from datamodules.tally import some


def check_labels(source: Source, option: str, label_count: int | None, strict: bool) -> None:
    """Holds a split's classes against a model that needs them.

    Args:
        source: the split.
        option: the configuration key of its shards.
        label_count: classes of the model, 0 to label_count - 1; None for any.
        strict: whether a sample without class stops the run.

    Raises:
        ValueError: where samples have no class, or one that the model has not.
    """
    known = source.labels
    if known is None or not known.samples:
        return
    where = f"data.init_args.{option} ({some([str(path) for path in source.paths])})"
    looked_at = f"the {known.samples} samples" if known.samples == len(source) else f"the first {known.samples} samples"
    if not known.labelled:
        raise ValueError(
            f"{where}: none of {looked_at} has a class (.cls), which this model learns from or is scored by; write "
            "shards from class folders with python -m datamodules.prepare imagefolder, or take a task that needs no "
            "classes, such as task/dino.yaml"
        )
    if strict and known.labelled < known.samples:
        raise ValueError(
            f"{where}: {known.samples - known.labelled} of {looked_at} have no class (.cls); write them with one, or "
            "leave them out by data.init_args.policy=skip"
        )
    if label_count is not None and known.highest is not None and known.lowest is not None:
        refuse_labels(known.lowest, known.highest, label_count, where)


def refuse_labels(lowest: int, highest: int, label_count: int, where: str) -> None:
    """ValueError for classes outside 0 … label_count - 1."""
    if 0 <= lowest <= highest < label_count:
        return
    remedy = (
        "they are counted from 1: write them from 0"
        if lowest >= 1 and highest == label_count
        else "set it to the data's number of classes, and count classes from 0"
    )
    raise ValueError(
        f"{where}: labels run from {lowest} to {highest}, model.init_args.num_classes is {label_count}, which allows "
        f"0 to {label_count - 1}; {remedy}"
    )


def check_classes(sources: Mapping[str, Source]) -> None:
    """ValueError where lists of classes differ or end early; of splits by the configuration keys of their shards."""
    listed = {
        option: source.classes
        for option, source in sources.items()
        if source.classes is not None and (source.labels is None or source.labels.labelled)
    }
    for option, names in listed.items():
        known = sources[option].labels
        if names and known and known.highest is not None and known.highest >= len(names):
            raise ValueError(
                f"data.init_args.{option}: the highest class is {known.highest}, {CLASSES_FILE} beside the shards "
                f"names {len(names)}; correct or remove it"
            )
    first = next(iter(listed), "")
    for option, names in listed.items():
        if found := differ(listed[first] or [], names or []):
            raise ValueError(f"the classes of data.init_args.{first} and data.init_args.{option} {found}")
