"""DINO's ten crops from JPEG bytes: against the transform of the reference code, and against plain albumentations.

Photographs of 500 x 375 (pieces of scikit-learn's two sample images, JPEG quality 90); crops: two of 224, eight of 96.
First on one core, bytes in and uint8 crops out; then from files through a data loader with two workers, collated.
"""

import io
import os
import random
import statistics
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
import albumentations as A
import cv2
import numpy as np
import torch
from measuring import Line, compare, in_turns
from PIL import Image, ImageFilter, ImageOps
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from common.memory import keep_freed_memory
from datamodules import MultiCropTransform, Position
from datamodules.buffers import rows_of
from datamodules.dataset import ShardDataset
from datamodules.loaders import ResumableLoader
from datamodules.multicrop import RATIO, MultiCrop, MultiCropConfig, render_in_python
from datamodules.sample_seed import SampleKey
from datamodules.samples import RawSample
from datamodules.shards import ShardSet
from datamodules.span_plan import TrainPlan
from datamodules.views import ViewParameters, renderer

IMAGES, EPOCH, BATCH, WORKERS = 32, 512, 32, 2
Views = list[np.ndarray]


def photographs() -> list[bytes]:
    rng, found = np.random.default_rng(0), []
    for number in range(IMAGES):
        whole = load_sample_images().images[number % 2]
        top, left = rng.integers(0, whole.shape[0] - 375 + 1), rng.integers(0, whole.shape[1] - 500 + 1)
        file = io.BytesIO()
        Image.fromarray(whole[top : top + 375, left : left + 500]).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


class Blur:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        sigma = random.uniform(0.1, 2.0)
        return image.filter(ImageFilter.GaussianBlur(sigma)) if random.random() < self.p else image


class Solarize:
    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image) if random.random() < 0.2 else image


class Reference:
    """DINO's augmentation as its code has it, on PIL images; with ``floats`` as it hands them on, normalised."""

    def __init__(self, floats: bool) -> None:
        jitter = T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
        end = [T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))] if floats else [np.asarray]

        def view(size: int, scale: tuple[float, float], *more: Callable) -> T.Compose:
            crop = T.RandomResizedCrop(size, scale=scale, interpolation=T.InterpolationMode.BICUBIC)
            return T.Compose([crop, T.RandomHorizontalFlip(0.5), jitter, T.RandomGrayscale(0.2), *more, *end])

        self.views = [view(224, (0.4, 1.0), Blur(1.0)), view(224, (0.4, 1.0), Blur(0.1), Solarize())]
        self.views += [view(96, (0.05, 0.4), Blur(0.5))] * 8

    def __call__(self, image: Image.Image) -> list:
        return [view(image) for view in self.views]

    def bytes(self, data: bytes) -> list:
        return self(Image.open(io.BytesIO(data)).convert("RGB"))


class Albumentations:
    """The same out of albumentations' own parts; antialiased by areas where it shrinks."""

    def __init__(self) -> None:
        def view(size: int, scale: tuple[float, float], blur: float, solarize: float) -> A.Compose:
            crop = A.RandomResizedCrop(
                (size, size), scale=scale, ratio=RATIO, interpolation=cv2.INTER_CUBIC, area_for_downscale="image"
            )
            colour = [A.ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8), A.ToGray(p=0.2)]
            blurred = A.GaussianBlur(blur_limit=0, sigma_limit=(0.1, 2.0), p=blur)
            inverted = A.Solarize(threshold_range=(128 / 255, 128 / 255), p=solarize)
            return A.Compose([crop, A.HorizontalFlip(p=0.5), *colour, blurred, inverted])

        self.views = [view(224, (0.4, 1.0), 1.0, 0.0), view(224, (0.4, 1.0), 0.1, 0.2)]
        self.views += [view(96, (0.05, 0.4), 0.5, 0.0)] * 8

    def bytes(self, data: bytes) -> Views:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        return [view(image=image)["image"].transpose(2, 0, 1) for view in self.views]


class Ours:
    def __init__(self) -> None:
        self.transform, self.count = MultiCropTransform(), 0
        self.rows = rows_of(self.transform.allocate(1), 0)

    def bytes(self, data: bytes) -> None:
        self.count += 1
        self.transform(RawSample("", "", {"jpg": data}), SampleKey(0, 0, self.count), self.rows)

    @staticmethod
    def decode(data: bytes) -> np.ndarray:
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


def one_core(files: list[bytes]) -> list[Line]:
    def over_all(function: Callable[[bytes], object]) -> Callable[[], None]:
        return lambda: [function(data) for data in files] and None

    ours, plain = Ours(), Albumentations()
    names = {
        "ours": ours.bytes,
        "the reference's transform, to uint8": Reference(floats=False).bytes,
        "the reference's transform, to normalised floats": Reference(floats=True).bytes,
        "albumentations, the same views": plain.bytes,
        "decoding alone": ours.decode,
    }
    times = in_turns({name: over_all(function) for name, function in names.items()}, 7)
    times = {name: [t / len(files) for t in found] for name, found in times.items()}
    goals = {"the reference's transform, to uint8": "≥ 8"}
    return [
        Line("an image to ten crops, one core", times["ours"], name, found, goals.get(name, ""))
        for name, found in times.items()
        if name != "ours"
    ]


def shares(files: list[bytes]) -> str:
    """What our time goes into: each stage of the views is the time with it less the time without."""
    ours, crops = Ours(), MultiCrop(MultiCropConfig())
    images = [Ours.decode(data) for data in files]
    drawn = [crops.draw(image.shape[1], image.shape[0], 0, 0, number) for number, image in enumerate(images)]
    render, out = (
        renderer() or render_in_python,
        [np.empty((3, kind.size, kind.size), np.uint8) for kind in crops.kinds],
    )

    def views(keep: Callable[[ViewParameters], ViewParameters]) -> Callable[[], None]:
        kept = [[keep(p) for p in parameters] for parameters in drawn]
        return lambda: [render(image, parameters, out) for image, parameters in zip(images, kept, strict=True)] and None

    nothing = ViewParameters((0, 0, 1, 1), (), False, None, False, False)
    stages = {
        "whole": lambda: [ours.bytes(data) for data in files],
        "decoding": lambda: [Ours.decode(data) for data in files],
        "boxes": views(lambda p: nothing._replace(box=p.box)),
        "jittered": views(lambda p: nothing._replace(box=p.box, jitter=p.jitter)),
        "complete": views(lambda p: p),
    }
    t = {name: statistics.median(found) / len(files) * 1e3 for name, found in in_turns(stages, 15).items()}
    return (
        f"Ours: whole {t['whole']:.2f}, decoding {t['decoding']:.2f}, resizing {t['boxes']:.2f}, "
        f"jitter {t['jittered'] - t['boxes']:.2f}, "
        f"grey, blur and the rest {t['complete'] - t['jittered']:.2f} ms an image."
    )


def write(files: list[bytes], folder: Path) -> None:
    """The same samples as shards and as a tree of files."""
    (folder / "tree/0").mkdir(parents=True)
    for shard in range(4):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as tar:
            for number in range(shard * EPOCH // 4, (shard + 1) * EPOCH // 4):
                for name, data in ((f"{number:06d}.jpg", files[number % IMAGES]), (f"{number:06d}.cls", b"0")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                (folder / f"tree/0/{number:06d}.jpg").write_bytes(files[number % IMAGES])


def loaders(files: list[bytes]) -> tuple[list[Line], str]:
    """Whole epochs, the workers started and warm."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(files, folder)
        shards = ShardSet.find(folder, "train-*.tar", "train_shards")
        dataset = ShardDataset(shards, MultiCropTransform(), TrainPlan(shards, BATCH, 0, 1, 0, 1024), 0)
        ours = ResumableLoader(dataset, Position(), BATCH, WORKERS)
        memory = []
        for _ in range(4):
            assert sum(len(batch["crops"][0]) for batch in ours) == EPOCH
            memory.append(resident())
        tree = ImageFolder(folder / "tree", Reference(floats=True))
        theirs = DataLoader(
            tree, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True, persistent_workers=True, prefetch_factor=4
        )

        def ours_whole() -> None:
            assert sum(len(batch["crops"][0]) for batch in ours) == EPOCH

        def theirs_whole() -> None:
            assert sum(len(views[0]) for views, _ in theirs) == EPOCH

        times = in_turns({"ours": ours_whole, "theirs": theirs_whole}, 3)
    each = {who: [t / EPOCH for t in found] for who, found in times.items()}
    line = Line(
        f"an image through a loader with {WORKERS} workers",
        each["ours"],
        "ImageFolder, the reference's transform and collation",
        each["theirs"],
        "≥ 8",
    )
    held = ", ".join(f"{m:.0f}" for m in memory)
    return [line], f"Our process and its workers held {held} MiB after one epoch, two, three and four."


def resident() -> float:
    """MiB of this process and its children, shared pages counted once a process."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text(encoding="utf-8")
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if os.getpid() in (int(fields["Pid"]), int(fields["PPid"])):
            total += int(fields.get("VmRSS", "0 kB").split()[0])
    return total / 1024


def main() -> None:
    keep_freed_memory()  # as every command of dinomamba does; it helps the peers alike
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    files = photographs()
    lines = one_core(files)
    profile = shares(files)
    more, note = loaders(files)
    size = sum(map(len, files)) / len(files) / 1024
    compare("input_pipeline", [*lines, *more], f"JPEG files of {size:.0f} KiB. {profile} {note}")


if __name__ == "__main__":
    main()
