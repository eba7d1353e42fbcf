"""Albumentations pipelines in the place of our own crops; written in YAML, see :mod:`datamodules.pipelines`.

They are annotated as plain dicts, which the command line hands on as they are written: it would instantiate the nested
ones of a ``dict[str, Any]`` and pass over what is wrong with them.

Shapes: n samples of a batch, K views.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from datamodules.buffers import Buffers, Rows, allocate
from datamodules.decoding import sample_pixels
from datamodules.pipelines import SeededPipeline
from datamodules.pixel_format import RGB, PixelFormat
from datamodules.sample_seed import SampleKey, SampleSeed
from datamodules.samples import RawSample
from datamodules.transforms import ImageTransform, Transform, label_of, with_format


@dataclass
class PipelineViews:
    """Views of one image that one pipeline makes.

    Args:
        size: side in pixels; the pipeline must end with it.
        pipeline: transforms in their order, each ``class_path: albumentations.NAME`` and ``init_args``.
        count: how many.
    """

    size: int
    pipeline: list[dict]
    count: int = 1


class AlbumentationsViews(Transform):
    """``crops``: K tensors (n, C, size, size), in the order of ``views``; and ``label``, -1 where there is none.

    DINO takes the first two for the global ones.

    Args:
        views: what makes them.
        key: how messages call ``views``.
        pixels: what images consist of.
    """

    def __init__(self, views: list[PipelineViews], key: str = "views", pixels: PixelFormat = RGB) -> None:
        if not views:
            raise ValueError(f"{key} is empty; list at least one, {{count, size, pipeline}}")
        for i, view in enumerate(views):
            if view.count < 1 or view.size < 1:
                raise ValueError(f"{key}[{i}]: count={view.count} and size={view.size} must be positive")
        self._specs, self._key, self.pixels = views, key, pixels
        self.fields = with_format(self.fields, pixels)

    @property
    def views(self) -> list[int]:
        """Sides of the views in their order."""
        return [view.size for view in self._specs for _ in range(view.count)]

    @property
    def sizes(self) -> dict[str, int]:
        return {f"multicrop_pipelines.{i}.size": view.size for i, view in enumerate(self._specs)}

    @cached_property
    def pipelines(self) -> list[SeededPipeline]:
        """One for each view, with one generator for all of an image; imports albumentations when first asked for."""
        self._seed = SampleSeed()
        made = [
            SeededPipeline(view.pipeline, view.size, f"{self._key}[{i}].pipeline", self._seed, self.pixels)
            for i, view in enumerate(self._specs)
        ]
        return [pipeline for pipeline, view in zip(made, self._specs, strict=True) for _ in range(view.count)]

    def prepare(self) -> None:
        _ = self.pipelines

    def allocate(self, n: int) -> Buffers:
        pixels = self.pixels
        shapes = [(n, pixels.in_chans, pipeline.size, pipeline.size) for pipeline in self.pipelines]
        return {"crops": allocate(shapes, pixels.buffer)}

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        image = sample_pixels(raw, self.pixels)
        self.pipelines[0].seed.set(*key)
        for pipeline, out in zip(self.pipelines, rows["crops"], strict=True):
            pipeline.draw(image, out)
        return {"label": label_of(raw, required=False)}

    def empty(self) -> dict[str, Any]:
        return {"label": torch.empty(0, dtype=torch.int64)}


class AlbumentationsImage(ImageTransform):
    """``image`` (n, C, size, size) by one pipeline, and ``label``; what probes and supervised runs train on.

    Args:
        size: side in pixels; the pipeline must end with it.
        pipeline: transforms in their order, each ``class_path: albumentations.NAME`` and ``init_args``.
        labels_required: a sample without class is an error; otherwise its label is -1.
        key: how messages call ``pipeline``.
        pixels: what images consist of.
    """

    def __init__(
        self,
        size: int,
        pipeline: list[dict],
        labels_required: bool = True,
        key: str = "pipeline",
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(size, labels_required, pixels)
        self._steps, self._key = pipeline, key

    @cached_property
    def pipeline(self) -> SeededPipeline:
        """Imports albumentations when it is first asked for."""
        return SeededPipeline(self._steps, self.size, self._key, pixels=self.pixels)

    def prepare(self) -> None:
        _ = self.pipeline

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        self.pipeline(sample_pixels(raw, self.pixels), key, rows["image"])
        return {"label": label_of(raw, self.labels_required)}
