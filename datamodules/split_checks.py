"""What is known of the splits of a run, held against each other and against the model before the first step."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from datamodules.classes import CLASSES_FILE, differ
from datamodules.pixel_format import RGB, PixelFormat
from datamodules.samples import ARRAY_FIELD, IMAGE_FIELDS, WANTED_CLASS, Source
from datamodules.statistics import recorded
from datamodules.tally import some
from datamodules.transforms import Transform


def check_images(source: Source, option: str, strict: bool) -> None:
    """ValueError where some samples of a split are known to have no image, and that stops the run.

    Args:
        source: the split.
        option: the configuration key of its shards.
        strict: whether a sample without image stops the run.
    """
    known = source.labels
    if strict and known is not None and known.imageless:
        raise ValueError(
            f"data.init_args.{option} ({some([str(path) for path in source.paths])}): {known.imageless} of "
            f"{known.samples} samples without an image (.{', .'.join((*IMAGE_FIELDS, ARRAY_FIELD))}); write them with "
            "one, or leave them out by data.init_args.policy=skip"
        )


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
    if known.unreadable and (strict or known.unreadable == known.labelled):
        raise ValueError(
            f"{where}: the class (.cls) of {known.unreadable} of {looked_at} is no number, the first {known.example}; "
            f"{WANTED_CLASS}"
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


def common_format(formats: Mapping[str, PixelFormat]) -> PixelFormat:
    """Of all splits, by their names. ValueError where they differ."""
    first = next(iter(formats), "")
    for name, one in formats.items():
        if one.record() != formats[first].record():
            raise ValueError(
                f"data.init_args.{name}.transform has {one.record()}, that of {first} {formats[first].record()}; a "
                "model takes images of one kind"
            )
    return formats.get(first, RGB)


def check_records(shards: Sequence[str | Source], info: str, root: str, pixels: PixelFormat) -> None:
    """ValueError where the text of an ``_info.json`` says that shards, by their patterns, hold other images."""
    for pattern in shards:
        for known in recorded(info, pattern) if isinstance(pattern, str) else []:
            pixels.check_record(known.pixels or {}, f"the shards of the split {known.split} in {root}")


def check_channels(of_backbone: int | None, of_data: int) -> None:
    """ValueError where a backbone takes other channels than the data have; None for one that does not say."""
    if of_backbone is not None and of_backbone != of_data:
        raise ValueError(
            f"model.init_args.backbone.init_args.in_chans is {of_backbone}, data.init_args.in_chans is {of_data}; set "
            "both to the channels that the images have"
        )


def colours_left_out(transform: Transform) -> str | None:
    """What of the multi-crop views' colours the images do not have, in a line; None for nothing."""
    config, pixels = getattr(transform, "multicrop", None), transform.pixels
    if config is None or pixels.plain:
        return None
    parts: list[str] = []
    if pixels.in_chans != 3:
        parts += [f"jitter of saturation {config.jitter[2]:g} and hue {config.jitter[3]:g}"] * any(config.jitter[2:])
        parts += [f"gray_prob {config.gray_prob:g}"] * bool(config.gray_prob)
    if pixels.top is None:
        parts += [f"solarize_prob {config.solarize_prob:g} (no max_value)"] * bool(config.solarize_prob)
    images = f"images of {pixels.in_chans} channels and {pixels.bits} bits"
    return f"data.init_args.multicrop: off, as {images} have no such thing: {', '.join(parts)}" if parts else None


class TakesSizes(Protocol):
    """What a backbone says of images' sizes."""

    def check_size(self, height: int, width: int) -> None: ...


def check_sizes(backbone: TakesSizes, sizes: Mapping[str, int]) -> None:
    """ValueError for images that a backbone does not take, of sides by their configuration keys."""
    for key, side in sizes.items():
        try:
            backbone.check_size(side, side)
        except ValueError as error:
            raise ValueError(f"data.init_args.{key}={side} does not fit {type(backbone).__name__}: {error}") from None
