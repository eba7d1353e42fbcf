"""Albumentations pipelines, written in YAML and seeded by the sample.

Each transform of a pipeline is ``class_path: albumentations.NAME`` with ``init_args``; those that hold others
(``Compose``, ``OneOf``, ``SomeOf``, …) have them in their ``init_args`` in the same form. Classes of one's own are
derived from albumentations'; in Python transforms may be objects.
"""

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from datamodules.pixel_format import RGB, PixelFormat
from datamodules.pixel_ops import write_planes
from datamodules.sample_seed import SampleKey, SampleSeed

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # its import would ask the network for a newer version

Steps = Sequence[Any]
"""Transforms in their order: mappings with class_path and init_args, or objects."""


def build(spec: Any, key: str) -> Any:
    """A transform of albumentations, or of its kind, out of its class_path and init_args.

    Args:
        spec: the mapping; an object is taken as it is.
        key: where it stands in the configuration, for messages.

    Raises:
        ValueError: for a class that cannot be found or is no such transform, and for arguments it does not take.
    """
    import albumentations  # a second, which pretraining by the renderer of ours does not need

    kinds = (albumentations.BasicTransform, albumentations.BaseCompose)
    if not isinstance(spec, Mapping):
        if isinstance(spec, kinds):
            return spec
        raise ValueError(f"{key} is {spec!r}; wanted class_path: albumentations.NAME and init_args")
    if unknown := sorted(set(spec) - {"class_path", "init_args"}):
        raise ValueError(f"{key} has the key {unknown[0]!r}; allowed: class_path, init_args")
    path = str(spec.get("class_path", ""))
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"{key}.class_path={path!r} is not found; wanted albumentations.NAME") from None
    if not (isinstance(kind, type) and issubclass(kind, kinds)):
        raise ValueError(f"{key}.class_path={path!r} is no transform of albumentations' kind")
    given = spec.get("init_args") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{key}.init_args is {given!r}; wanted names and values")
    _refuse_unknown(kind, given, f"{key}.init_args")
    arguments = {name: _nested(value, f"{key}.init_args.{name}") for name, value in given.items()}
    try:
        return kind(**arguments)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {path} refuses its init_args: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """In one line; albumentations hands pydantic's many on, whose last one is a web address."""
    problems = getattr(error.__cause__, "errors", None)
    if problems is None:
        return str(error)
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems())


def _refuse_unknown(kind: type, given: Mapping[str, Any], key: str) -> None:
    """Albumentations itself would warn and go on."""
    parameters = inspect.signature(kind).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    if wrong := sorted(set(given) - set(parameters)):
        raise ValueError(
            f"{key} has {wrong[0]!r}, which {kind.__name__} does not take; allowed: {', '.join(parameters)}"
        )


def _nested(value: Any, key: str) -> Any:
    """A value in which transforms are built, singly or in a list."""
    if isinstance(value, Mapping) and "class_path" in value:
        return build(value, key)
    if isinstance(value, list):
        return [_nested(one, f"{key}[{i}]") for i, one in enumerate(value)]
    return value


class SeededPipeline:
    """A pipeline whose draws are a function of the sample's key; the same ones in any worker.

    Albumentations takes bytes, and floats in [0, 1]: it sees 16 bits as value / 65535, and floats as they are.

    Args:
        steps: the transforms.
        size: side of what comes out, in pixels.
        key: where the pipeline stands in the configuration, for messages.
        seed: generators that pipelines of one image share; None for its own.
        pixels: what images consist of.
    """

    def __init__(
        self, steps: Steps, size: int, key: str, seed: SampleSeed | None = None, pixels: PixelFormat = RGB
    ) -> None:
        import albumentations

        self.pixels = pixels

        self.seed = SampleSeed() if seed is None else seed
        self.size, self._key = size, key
        self._compose = albumentations.Compose([build(step, f"{key}[{i}]") for i, step in enumerate(steps)])
        self._compose.set_random_state(self.seed.numpy, self.seed.python)  # reaches the nested ones

    def draw(self, image: np.ndarray, out: np.ndarray) -> None:
        """Writes what the pipeline makes of an image with the generators as they stand.

        Args:
            image: (H, W, C) of the format's dtype; may be changed.
            out: (C, size, size) of the buffer's.

        Raises:
            ValueError: for an outcome of another shape or dtype, naming the pipeline's key.
        """
        pixels = self.pixels
        if pixels.bits == 16:
            image = image.astype(np.float32) / np.float32(pixels.scale)
        view = self._compose(image=image)["image"]
        wanted, dtype = (self.size, self.size, pixels.in_chans), np.uint8 if pixels.bits == 8 else np.float32
        if not isinstance(view, np.ndarray) or view.shape != wanted or view.dtype != dtype:
            found = f"{tuple(view.shape)} {view.dtype}"
            raise ValueError(
                f"{self._key} made {found} of an image of {image.shape}; with size={self.size} it must make {wanted} "
                f"{dtype.__name__}: let it resize to that size, and leave out what makes "
                f"{'floats or tensors' if pixels.bits == 8 else 'tensors'} (images are normalised on the device)"
            )
        if pixels.plain:
            write_planes(view, False, out)
        elif pixels.bits == 16:
            out[:] = (view.transpose(2, 0, 1) * np.float32(pixels.scale)).clip(0, pixels.top)
        else:
            out[:] = view.transpose(2, 0, 1)

    def __call__(self, image: np.ndarray, key: SampleKey, out: np.ndarray) -> None:
        """:meth:`draw` for a sample."""
        self.seed.set(*key)
        self.draw(image, out)


def probe_steps(size: int, scale: tuple[float, float], ratio: tuple[float, float]) -> list[Any]:
    """The linear probe's training view: RandomResizedCrop (bilinear) and flip.

    Args:
        size: side of the view in pixels.
        scale: range of the crop's area over the image's.
        ratio: range of its width over its height.
    """
    import albumentations

    # antialiased where it shrinks, which cv2's bilinear is not
    crop = albumentations.RandomResizedCrop(
        (size, size), scale=scale, ratio=ratio, interpolation=cv2.INTER_LINEAR, area_for_downscale="image"
    )
    return [crop, albumentations.HorizontalFlip(p=0.5)]
