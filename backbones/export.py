"""Writes a backbone as an ONNX file that other programs run, and proves the file against the backbone.

Needs onnx, onnxscript and onnxruntime: ``pip install 'dinomamba[export]'``.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backbones.base import Backbone
from backbones.sequence import SequenceBackbone
from common.files import written_aside

OUTPUTS = ("embedding", "logits", "cls", "patches", "registers")
OPSET = 18
TOLERANCE = 1e-4
"""Of a file's outputs, relative to the largest number among them where that is above 1."""
EXPORTERS = ("torchscript", "dynamo")


class Outputs(nn.Module):
    """A backbone as a module of tensors alone, which every tracer takes.

    Args:
        backbone: what runs.
        outputs: of ``OUTPUTS``, in this order. ``cls``, ``patches`` and ``registers`` are of ``forward_features``.
        mean, std: of each channel. Where they are given the images are RGB in [0, 1], and normalised inside.

    Raises:
        ValueError: for an unknown output, or one that the backbone does not have.
    """

    def __init__(
        self, backbone: Backbone, outputs: Sequence[str] = ("embedding",),
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not outputs or (unknown := set(outputs) - set(OUTPUTS)):
            found = ", ".join(sorted(unknown)) if outputs else "none"
            raise ValueError(f"outputs: found {found}; allowed: {', '.join(OUTPUTS)}")
        if "logits" in outputs and not backbone.num_classes:
            raise ValueError(f"outputs: logits, but this {type(backbone).__name__} has no classifier; leave them out")
        if (mean is None) != (std is None):
            raise ValueError("mean and std go together")
        self.backbone, self.outputs = backbone, tuple(outputs)
        self.normalizes = mean is not None
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, None if values is None else torch.tensor(values).view(-1, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, C, H, W) to the outputs: embedding (B, D), logits (B, classes), patches (B, D, h, w), ..."""
        if self.normalizes:
            images = (images - self.mean) / self.std
        found: dict[str, Any] = {}
        if "embedding" in self.outputs:
            found["embedding"] = self.backbone.embedding(images)
        if "logits" in self.outputs:
            found["logits"] = self.backbone.logits(images)
        if not found.keys() >= set(self.outputs):
            found |= self.backbone.forward_features(images)._asdict()
        if missing := [name for name in self.outputs if found[name] is None]:
            raise ValueError(
                f"outputs: {', '.join(missing)}, but {type(self.backbone).__name__} has none; leave it out"
            )
        return tuple(found[name] for name in self.outputs)


def to_onnx(
    model: Outputs, path: str | Path, img_size: tuple[int, int] | None = None, free_size: bool = True,
    exporter: str = "torchscript", metadata: dict[str, str] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Writes ``images`` → the model's outputs, for any batch, and compares the file with the model.

    Both run on random batches of 1 and 5, and, where the size is free, on images of another height and width too. Only
    a file that agrees gets its name; one that does not is removed.

    Args:
        model: in evaluation mode afterwards.
        path: of the file.
        img_size: height and width traced with, and the only ones that the file takes unless ``free_size``; None for
            those that the backbone was built for.
        free_size: whether the file is to take every height and width that are multiples of the patch.
        exporter: ``torchscript``, or ``dynamo``, which takes several times as long.
        metadata: kept in the file.

    Returns:
        the largest difference of each output over all that was tried.

    Raises:
        ValueError: where a package is missing, the model does not take a free size, or file and model differ.
    """
    if exporter not in EXPORTERS:
        raise ValueError(f"exporter={exporter!r}; allowed: {', '.join(EXPORTERS)}")
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{path}: writing ONNX needs {', '.join(missing)}: pip install 'dinomamba[export]'")
    model.eval()
    backbone, patch = model.backbone, model.backbone.patch_size
    in_chans, *native = _input_size(backbone)
    height, width = img_size = img_size or (native[0], native[1])
    sizes = [(height, width), (height + patch, width + 2 * patch)] if free_size else [(height, width)]
    with written_aside(Path(path)) as aside:
        try:
            _write(model, aside, (2, in_chans, height, width), free_size, exporter)
            _describe(aside, _about(model, img_size, free_size) | (metadata or {}))
            return _compared(model, aside, [(b, in_chans, *size) for size in sizes for b in (1, 5)])
        except Exception as error:
            hint = (
                f"; {type(backbone).__name__} may take one size only: try --fixed-size (free_size=False)"
                if free_size
                else ""
            )
            reason = " ".join(str(error).split())[:400]
            raise ValueError(f"{path} is not written: {type(error).__name__}: {reason}{hint}") from error


def _input_size(backbone: Backbone) -> tuple[int, int, int]:
    """Channels, height and width that a backbone is built for."""
    if isinstance(backbone, SequenceBackbone):
        height, width = (side * backbone.patch_size for side in backbone.grid_size)
        return int(backbone.patch_embed.proj.in_channels), height, width
    inner = getattr(backbone, "model", backbone)
    config = getattr(inner, "default_cfg", {})
    channels, *size = config.get("input_size", (3, 224, 224))
    height, width = getattr(getattr(inner, "patch_embed", None), "img_size", None) or size
    return int(backbone.in_chans or getattr(inner, "in_chans", channels)), int(height), int(width)


def _write(model: Outputs, path: Path, shape: tuple[int, ...], free_size: bool, exporter: str) -> None:
    free = {0: "batch"} | ({2: "height", 3: "width"} if free_size else {})
    dynamo = exporter == "dynamo"
    options: dict[str, Any]
    if dynamo:
        options = {"dynamic_shapes": (free,), "external_data": False}
    else:
        maps = {name: {0: "batch"} | ({2: "rows", 3: "columns"} if name == "patches" else {}) for name in model.outputs}
        options = {"dynamic_axes": {"images": free, **maps}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (torch.randn(shape),), path, opset_version=OPSET, dynamo=dynamo, verbose=False,
            input_names=["images"], output_names=list(model.outputs), **options,
        )  # fmt: skip


def _about(model: Outputs, img_size: tuple[int, int], free_size: bool) -> dict[str, str]:
    inside = model.normalizes
    return {
        "backbone": type(model.backbone).__name__,
        "images": "RGB in [0, 1]" if inside else "normalised by the caller",
        "sizes": f"multiples of {model.backbone.patch_size}" if free_size else f"{img_size[0]} x {img_size[1]}",
    }


def _describe(path: Path, metadata: dict[str, str]) -> None:
    import onnx

    file = onnx.load(path)
    onnx.helper.set_model_props(file, metadata)
    onnx.save(file, path)


def _compared(model: Outputs, path: Path, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    generator, worst = torch.Generator().manual_seed(0), dict.fromkeys(model.outputs, 0.0)
    for shape in shapes:
        images = torch.randn(shape, generator=generator)
        images = images.sigmoid() if model.normalizes else images
        with torch.no_grad():
            wanted = model(images)
        found = session.run(list(model.outputs), {"images": images.numpy()})
        for name, ours, theirs in zip(model.outputs, wanted, found, strict=True):
            if tuple(ours.shape) != theirs.shape:
                raise ValueError(f"{name} of images {shape} has shape {theirs.shape}, wanted {tuple(ours.shape)}")
            error = float((ours - torch.from_numpy(theirs)).abs().max())
            worst[name] = max(worst[name], error)
            if not error <= TOLERANCE * max(1.0, float(ours.abs().max())):
                raise ValueError(f"{name} of images {shape} is off by {error:.2g}")
    return worst
