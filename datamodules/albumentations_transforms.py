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
from datamodules.decoding import open_image
from datamodules.pipelines import SeededPipeline
from datamodules.sample_seed import SampleKey, SampleSeed
from datamodules.samples import RawSample
from datamodules.transforms import ImageTransform, Transform, label_of


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
    """``crops``: K tensors (n, 3, size, size) uint8, in the order of ``views``; and ``label``, -1 where there is none.

    DINO takes the first two for the global ones.

    Args:
        views: what makes them.
        key: how messages call ``views``.
    """

    def __init__(self, views: list[PipelineViews], key: str = "views") -> None:
        if not views:
            raise ValueError(f"{key} is empty; list at least one, {{count, size, pipeline}}")
        for i, view in enumerate(views):
            if view.count < 1 or view.size < 1:
                raise ValueError(f"{key}[{i}]: count={view.count} and size={view.size} must be positive")
        self.views, self._key = views, key

    @cached_property
    def pipelines(self) -> list[SeededPipeline]:
        """One for each view, with one generator for all of an image; imports albumentations when first asked for."""
        self._seed = SampleSeed()
        made = [
            SeededPipeline(view.pipeline, view.size, f"{self._key}[{i}].pipeline", self._seed)
            for i, view in enumerate(self.views)
        ]
        return [pipeline for pipeline, view in zip(made, self.views, strict=True) for _ in range(view.count)]

    def prepare(self) -> None:
        _ = self.pipelines

    def allocate(self, n: int) -> Buffers:
        return {"crops": allocate([(n, 3, pipeline.size, pipeline.size) for pipeline in self.pipelines])}

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        image = open_image(raw).pixels()
        self.pipelines[0].seed.set(*key)
        for pipeline, out in zip(self.pipelines, rows["crops"], strict=True):
            pipeline.draw(image, out)
        return {"label": label_of(raw, required=False)}

    def empty(self) -> dict[str, Any]:
        return {"label": torch.empty(0, dtype=torch.int64)}


class AlbumentationsImage(ImageTransform):
    """``image`` (n, 3, size, size) uint8 by one pipeline, and ``label``; what probes and supervised runs train on.

    Args:
        size: side in pixels; the pipeline must end with it.
        pipeline: transforms in their order, each ``class_path: albumentations.NAME`` and ``init_args``.
        labels_required: a sample without class is an error; otherwise its label is -1.
        key: how messages call ``pipeline``.
    """

    def __init__(self, size: int, pipeline: list[dict], labels_required: bool = True, key: str = "pipeline") -> None:
        super().__init__(size, labels_required)
        self._steps, self._key = pipeline, key

    @cached_property
    def pipeline(self) -> SeededPipeline:
        """Imports albumentations when it is first asked for."""
        return SeededPipeline(self._steps, self.size, self._key)

    def prepare(self) -> None:
        _ = self.pipeline

    def __call__(self, raw: RawSample, key: SampleKey, rows: Rows) -> dict[str, Any]:
        self.pipeline(open_image(raw).pixels(), key, rows["image"])
        return {"label": label_of(raw, self.labels_required)}
