"""What a batch shows of its samples: the contract, and what images are turned into here.

Shapes: n samples of a batch, C channels, H x W pixels, K views, A answers. Images leave the workers as uint8, those of
16 bits and floats as float32 in their own units.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.buffers import Buffers, Rows, allocate
from datamodules.collation import collate
from datamodules.decoding import decode_image, decode_mask, open_image, sample_pixels
from datamodules.eval_transforms import ResizeCenterCrop
from datamodules.labels import validation_labels, validation_number
from datamodules.masks import ENCODINGS, MaskEncoding
from datamodules.multicrop import RATIO, MultiCrop, MultiCropConfig
from datamodules.pipelines import SeededPipeline, probe_steps
from datamodules.pixel_format import RGB, PixelFormat
from datamodules.sample_seed import SampleKey
from datamodules.samples import IMAGE_FIELDS, RawSample, ShardError, class_number

IMAGES = ("image", "crops")
"""What entries that hold images are called, unless a transform says otherwise."""


class Transform(ABC):
    """What a batch shows of a sample; subclass it for another kind of data.

    A subclass says what a sample becomes (:meth:`__call__`) and what a batch of no samples holds (:meth:`empty`),
    which declares each entry for all batches. It lives in the loading processes and draws at random from the
    sample's key alone, so that the stream of samples depends neither on the number of workers nor on an interruption.

    Attributes:
        fields: members of a sample that are read.
        images: entries that hold images, normalised to floats on the device.
        pixels: what images consist of; those of ``images`` leave the workers in its ``buffer`` dtype.
        labels_required: whether every sample must have a class; what is known of a split's classes is then checked
            before the first step.
    """

    fields: Sequence[str] = (*IMAGE_FIELDS, "cls")
    images: Sequence[str] = IMAGES
    pixels: PixelFormat = RGB
    labels_required: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sides of the images that a batch shows, in pixels, by the option that says them."""
        return {}

    def prepare(self) -> None:  # noqa: B027  # most need nothing
        """What all loading processes need done once, such as compiling or importing; called before they start."""

    def allocate(self, n: int) -> Buffers:
        """Buffers for n samples, whose rows :meth:`__call__` writes; a copy less for large entries than returning them.

        Not needed: what is returned of samples is collated. See :func:`datamodules.buffers.allocate`.
        """
        return {}

    @abstractmethod
    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        """Makes a sample.

        Args:
            raw: its bytes.
            key: what its randomness is a function of; ``key.generator()`` draws.
            rows: its rows of what :meth:`allocate` gave, to write to.

        Returns:
            The rest, by entry: integers, floats, arrays, strings. Batches have ``key``, ``shard``, ``skipped`` and
            ``split`` by themselves.

        Raises:
            ShardError: for a sample that is not as it should be, naming it; the ``policy`` says what follows.
        """

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """The entries of a batch of no samples, buffers left out.

        They declare those of all batches: a tensor (0, ...) stacks integers, floats or arrays of that shape and dtype;
        a list keeps one element a sample, so arrays of unequal shape, such as boxes (n_i, 4), become a list of tensors.
        Entries that are not declared are stacked where all samples have one and shapes agree.
        """

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What samples returned, at least one, to the entries of a batch."""
        return collate(samples, self.empty(), type(self).__name__)

    def finish(self, batch: dict[str, Any], normalize: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Completes a batch on the device it was moved to.

        Args:
            batch: all of it.
            normalize: images (..., C, H, W) to normalised floats in the model's dtype.
        """
        return finish_images(batch, normalize, self.images, self.pixels.buffer)


def finish_images(
    batch: dict[str, Any],
    normalize: Callable[[Tensor], Tensor],
    images: Sequence[str] = IMAGES,
    raw: torch.dtype = torch.uint8,
) -> dict[str, Any]:
    """A batch whose entries ``images`` are normalised where they are of dtype ``raw``; see :meth:`Transform.finish`."""
    return batch | {name: _normalized(batch[name], normalize, raw) for name in images if name in batch}


def _normalized(value: Any, normalize: Callable[[Tensor], Tensor], raw: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_normalized(one, normalize, raw) for one in value]
    return normalize(value) if isinstance(value, Tensor) and value.dtype == raw else value


def normalize(
    image: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype, full: float = 255
) -> Tensor:
    """(..., C, H, W) on any device to (x / full - mean) / std in ``dtype``.

    Half precision does not hold values of 16 bits: floats are normalised in float32 at least.
    """
    wanted, dtype = dtype, dtype if image.dtype == torch.uint8 else torch.promote_types(dtype, torch.float32)
    scale = torch.tensor(std, dtype=dtype, device=image.device).mul(full).reciprocal()[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=dtype, device=image.device)
    return torch.addcmul(shift[:, None, None], image.to(dtype), scale).to(wanted)


def label_of(raw: RawSample, required: bool = True) -> int:
    """A sample's class; -1 where it needs none and has none, or one that is no number."""
    if required:
        return raw.label()
    number = class_number(raw.fields.get("cls", b""))
    return -1 if number is None else number


def with_format(fields: Sequence[str], pixels: PixelFormat) -> Sequence[str]:
    """Members to read, those among them that may hold an image of a format."""
    return fields if pixels.plain else (*pixels.fields, *(field for field in fields if field not in pixels.fields))


class ImageTransform(Transform):
    """Makes ``image`` (n, C, size, size) in place, and ``label`` (n) int64.

    Args:
        size: side in pixels.
        labels_required: a sample without class is an error; otherwise its label is -1.
        pixels: what images consist of.
    """

    size_option = "probe_size"
    """What data modules call ``size``."""

    def __init__(self, size: int, labels_required: bool = True, pixels: PixelFormat = RGB) -> None:
        self.size, self.labels_required, self.pixels = size, labels_required, pixels
        self.fields = with_format(self.fields, pixels)

    @property
    def sizes(self) -> dict[str, int]:
        return {self.size_option: self.size}

    def allocate(self, n: int) -> Buffers:
        pixels = self.pixels
        return {"image": allocate([(n, pixels.in_chans, self.size, self.size)], pixels.buffer)[0]}

    def empty(self) -> dict[str, Any]:
        return {"label": torch.empty(0, dtype=torch.int64)}


class MultiCropTransform(Transform):
    """``crops``: the views of DINO, K tensors (n, C, size, size); and ``label``, -1 where a sample has no class.

    Args:
        multicrop: the views.
        pixels: what images consist of.
    """

    def __init__(
        self,
        multicrop: MultiCropConfig = MultiCropConfig(),  # noqa: B008  # a value, never changed
        pixels: PixelFormat = RGB,
    ) -> None:
        self.multicrop, self.pixels = multicrop, pixels
        self.fields = with_format(self.fields, pixels)

    @property
    def views(self) -> list[int]:
        """Sides of the views in their order."""
        c = self.multicrop
        return [c.global_size] * 2 + [c.local_size] * c.num_local

    @property
    def sizes(self) -> dict[str, int]:
        c = self.multicrop
        local = {"multicrop.local_size": c.local_size} if c.num_local else {}
        return {"multicrop.global_size": c.global_size} | local

    @property
    def size(self) -> int:
        """Side of the global views in pixels."""
        return self.multicrop.global_size

    @cached_property
    def crops(self) -> MultiCrop:
        """Compiles the renderer when it is first asked for."""
        return MultiCrop(self.multicrop, self.pixels)

    def prepare(self) -> None:
        _ = self.crops

    def allocate(self, n: int) -> Buffers:
        pixels = self.pixels
        return {
            "crops": allocate([(n, pixels.in_chans, kind.size, kind.size) for kind in self.crops.kinds], pixels.buffer)
        }

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        if self.pixels.plain:
            image = open_image(raw)
            parameters = self.crops.draw(*image.size, *key)
            found, size = image.pixels(self.crops.reduction(parameters)), image.size
        else:
            found = sample_pixels(raw, self.pixels)
            size = found.shape[1], found.shape[0]
            parameters = self.crops.draw(*size, *key)
        self.crops.render(found, size, parameters, rows["crops"])
        return {"label": label_of(raw, required=False)}  # pretraining needs no classes

    def empty(self) -> dict[str, Any]:
        return {"label": torch.empty(0, dtype=torch.int64)}


class ProbeTransform(ImageTransform):
    """``image`` under the linear probe's augmentation (RandomResizedCrop, flip), and ``label``.

    Args:
        size: side of the image in pixels.
        scale: range of the crop's area over the image's.
        pixels: what images consist of.
    """

    def __init__(self, size: int = 224, scale: tuple[float, float] = (0.08, 1.0), pixels: PixelFormat = RGB) -> None:
        super().__init__(size, pixels=pixels)
        self.scale = scale

    @cached_property
    def crop(self) -> SeededPipeline:
        """Imports albumentations when it is first asked for."""
        return SeededPipeline(probe_steps(self.size, self.scale, RATIO), self.size, "probe", pixels=self.pixels)

    def prepare(self) -> None:
        _ = self.crop

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        self.crop(sample_pixels(raw, self.pixels), key, rows["image"])
        return {"label": label_of(raw)}


class EvaluationTransform(ImageTransform):
    """``image`` under the evaluation transform, ``label``, and ``mask`` (n, crop, crop) int32.

    Batches have ``mask`` where each of their samples has one.

    Args:
        resize: shorter side after resizing, in pixels.
        crop: side of the centre crop.
        masks_required: a sample without mask is an error.
        labels_required: a sample without class is an error; otherwise its label is -1.
        mask_encoding: how masks tell ids; see :data:`datamodules.masks.MaskEncoding`.
        largest_id: highest id in masks beside 1000; None for any.
        pixels: what images consist of.
    """

    fields: Sequence[str] = (*IMAGE_FIELDS, "cls", "mask.png")
    size_option = "crop"

    def __init__(
        self,
        resize: int = 256,
        crop: int = 224,
        masks_required: bool = False,
        labels_required: bool = True,
        mask_encoding: MaskEncoding = "auto",
        largest_id: int | None = None,
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(crop, labels_required, pixels)
        if mask_encoding not in ENCODINGS:
            raise ValueError(f"mask_encoding={mask_encoding!r}; allowed: {', '.join(ENCODINGS)}")
        self.geometry, self.masks_required = ResizeCenterCrop(resize, crop), masks_required
        self.mask_encoding: MaskEncoding = mask_encoding
        self.largest_id = largest_id

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        if self.pixels.plain:
            image = decode_image(raw)
            size, view = image.size, partial(self.geometry.image, image)
        else:
            found = sample_pixels(raw, self.pixels)
            size, view = (found.shape[1], found.shape[0]), partial(self.geometry.channels, found, self.pixels)
        sample: dict[str, Any] = {"label": label_of(raw, self.labels_required)}
        if self.masks_required or "mask.png" in raw.fields:
            sample["mask"] = self.geometry.mask(decode_mask(raw, size, self.mask_encoding, self.largest_id))
        rows["image"][:] = view()
        return sample

    def empty(self) -> dict[str, Any]:
        masks = torch.empty(0, self.size, self.size, dtype=torch.int32)
        return super().empty() | ({"mask": masks} if self.masks_required else {})


class AnswersTransform(EvaluationTransform):
    """``image`` under the evaluation transform, ``label``, and ``answers`` (n, A): right classes, padded with -1.

    Args:
        resize, crop: see EvaluationTransform.
        labels: label lists of the ILSVRC validation images in their order: ``imagenet_real``, or a JSON file; None
            for a sample's own class, whose A is 1.
    """

    fields = (*IMAGE_FIELDS, "cls", "json")

    def __init__(self, resize: int = 256, crop: int = 224, labels: str | None = None) -> None:
        super().__init__(resize, crop)
        self._labels = labels

    @cached_property
    def lists(self) -> list[list[int]] | None:
        """The label lists, read when they are first asked for."""
        return None if self._labels is None else validation_labels(self._labels)

    @cached_property
    def width(self) -> int:
        """A."""
        return 1 if self.lists is None else max(1, max(map(len, self.lists), default=1))

    def prepare(self) -> None:
        _ = self.width

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        sample = super().__call__(raw, key, rows)
        right = [sample["label"]]
        if self.lists is not None:
            number = validation_number(f"{raw.key} {raw.fields.get('json', b'').decode(errors='replace')}")
            if number >= len(self.lists):
                raise ShardError(f"{raw.name} is image {number + 1}; there are labels for {len(self.lists)}")
            right = self.lists[number]
        return sample | {"answers": np.array(right + [-1] * (self.width - len(right)), dtype=np.int64)}

    def empty(self) -> dict[str, Any]:
        return super().empty() | {"answers": torch.empty(0, self.width, dtype=torch.int64)}
