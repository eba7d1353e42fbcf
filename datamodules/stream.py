"""Streams of batches out of shards: the views of a sample, the dataset that plans and reads, its loader.

Batches are dicts. Every batch has ``key`` and ``shard`` (lists of str, one for each sample) and ``skipped`` (list of
str, what was left out and why).
"""

import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from datamodules.decoding import decode_image, decode_mask, open_image
from datamodules.eval_transforms import EvalTransform
from datamodules.multicrop import MultiCrop, MultiCropConfig, ProbeCrop
from datamodules.samples import IMAGE_FIELDS, RawSample, SampleReader, ShardError, Source
from datamodules.span_plan import EpochPlan, Part

POLICIES = ("strict", "skip")
MOST_PARTS = 64
AHEAD = 8
"""Batches of a worker between asking for a remote shard and reading it."""


Space = dict[str, Tensor | list[Tensor]]
"""Where a batch's images are written: (n, 3, H, W) uint8, or a list of these."""


class View(Protocol):
    """What a batch shows of a sample."""

    fields: tuple[str, ...]

    def space(self, n: int) -> Space:
        """For the images of n samples."""
        ...

    def __call__(self, raw: RawSample, seed: int, epoch: int, index: int, space: Space, row: int) -> dict[str, Any]:
        """Writes a sample's images into that row of the space; returns the rest."""
        ...

    def empty(self) -> dict[str, Any]:
        """The rest of a batch of no samples."""
        ...


def allocate(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """uint8 tensors in one piece of memory: a shared one inside a worker, so that handing them over copies nothing."""
    sizes = [math.prod(shape) for shape in shapes]
    if get_worker_info() is None or not sum(sizes):
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
    else:
        memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(sum(sizes)))
        _fault_in(memory)
    return [piece.view(shape) for piece, shape in zip(memory.split(sizes), shapes, strict=True)]


def _fault_in(memory: torch.Tensor) -> None:
    """Asks Linux for all pages at once, which costs less than faulting them in one by one."""
    if sys.platform == "linux":
        populate_write = 23  # MADV_POPULATE_WRITE; kernels before 5.14 refuse it, and then nothing is lost
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), ctypes.c_int(populate_write)
        )


class MultiCropView:
    """``crops``: the views of DINO, (n, 3, size, size) uint8 each; and ``label``."""

    fields: tuple[str, ...] = (*IMAGE_FIELDS, "cls")

    def __init__(self, config: MultiCropConfig) -> None:
        self.crops = MultiCrop(config)

    def space(self, n: int) -> Space:
        return {"crops": allocate([(n, 3, kind.size, kind.size) for kind in self.crops.kinds])}

    def __call__(self, raw: RawSample, seed: int, epoch: int, index: int, space: Space, row: int) -> dict[str, Any]:
        image = open_image(raw)
        parameters = self.crops.draw(*image.size, seed, epoch, index)
        pixels = image.pixels(self.crops.reduction(parameters))
        self.crops.render(pixels, image.size, parameters, [view.numpy()[row] for view in space["crops"]])
        return {"label": raw.label() if "cls" in raw.fields else -1}  # pretraining needs no classes

    def empty(self) -> dict[str, Any]:
        raise AssertionError("training batches are never empty")


class ProbeView:
    """``image`` under the probe's augmentation, (n, 3, size, size) uint8, and ``label``."""

    fields: tuple[str, ...] = (*IMAGE_FIELDS, "cls")

    def __init__(self, size: int, scale: tuple[float, float]) -> None:
        self.size, self.crop = size, ProbeCrop(size, scale)

    def space(self, n: int) -> Space:
        return {"image": allocate([(n, 3, self.size, self.size)])[0]}

    def __call__(self, raw: RawSample, seed: int, epoch: int, index: int, space: Space, row: int) -> dict[str, Any]:
        self.crop(open_image(raw).pixels(), seed, epoch, index, space["image"][row].numpy())
        return {"label": raw.label()}

    def empty(self) -> dict[str, Any]:
        raise AssertionError("training batches are never empty")


class EvalView:
    """``image`` under the evaluation transform, ``label``, and ``mask`` where every sample of the batch has one.

    Args:
        masks_required: a sample without mask is an error.
        labels_required: a sample without class is an error; otherwise its label is -1.
    """

    fields: tuple[str, ...] = (*IMAGE_FIELDS, "cls", "mask.png")

    def __init__(self, transform: EvalTransform, masks_required: bool = False, labels_required: bool = True) -> None:
        self.transform, self.masks_required, self.labels_required = transform, masks_required, labels_required

    def space(self, n: int) -> Space:
        return {"image": allocate([(n, 3, self.transform.crop, self.transform.crop)])[0]}

    def __call__(self, raw: RawSample, seed: int, epoch: int, index: int, space: Space, row: int) -> dict[str, Any]:
        image = decode_image(raw)
        sample: dict[str, Any] = {"label": raw.label() if self.labels_required or "cls" in raw.fields else -1}
        if self.masks_required or "mask.png" in raw.fields:
            sample["mask"] = self.transform.mask(decode_mask(raw, image.size))
        space["image"][row].numpy()[:] = self.transform.image(image)
        return sample

    def empty(self) -> dict[str, Any]:
        side = self.transform.crop
        masks = {"mask": torch.empty(0, side, side, dtype=torch.int32)} if self.masks_required else {}
        return {"label": torch.empty(0, dtype=torch.int64), **masks}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stacks what all samples have: arrays and integers; the rest as lists."""
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        if not all(name in s for s in samples):
            continue
        if isinstance(first, np.ndarray):
            batch[name] = torch.from_numpy(np.stack([s[name] for s in samples]))
        elif isinstance(first, int):
            batch[name] = torch.tensor([s[name] for s in samples])
        else:
            batch[name] = [s[name] for s in samples]
    return batch


class ShardDataset(IterableDataset):
    """Yields whole batches of one rank; the same ones for any number of workers.

    Args:
        shards: where the samples are.
        view: what a batch shows of them.
        plan: epoch and what was done of it -> this rank's EpochPlan of the rest.
        seed: of the augmentation.
        policy: ``strict`` stops at the first bad sample, naming it; ``skip`` leaves it out and says so in the batch.
    """

    def __init__(
        self,
        shards: Source,
        view: View,
        plan: Callable[[int, Sequence[Part]], EpochPlan],
        seed: int,
        policy: str = "strict",
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"data.init_args.policy={policy!r}; allowed: {', '.join(POLICIES)}")
        self.shards, self.view, self.plan, self.seed, self.policy = shards, view, plan, seed, policy
        # the epoch, the number of parts done, and the parts; shared, so that it reaches workers that live on
        self._state = torch.zeros(2 + 3 * MOST_PARTS, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int, done: Sequence[Part] = ()) -> None:
        """Takes effect at the next ``iter``, in living workers too; ``done`` is left out of the epoch."""
        if len(done) > MOST_PARTS:
            raise ValueError(
                f"this epoch was interrupted {len(done)} times with other numbers of devices; start it over"
            )
        self._state[:2] = torch.tensor([epoch, len(done)])
        for number, part in enumerate(done):
            self._state[2 + 3 * number : 5 + 3 * number] = torch.tensor(part)

    @property
    def epoch(self) -> int:
        """The epoch last set."""
        return int(self._state[0])

    def _now(self) -> tuple[int, EpochPlan]:
        epoch, count = self._state[:2].tolist()
        parts = self._state[2 : 2 + 3 * count].view(-1, 3).tolist()
        return epoch, self.plan(epoch, [Part(*part) for part in parts])

    @property
    def num_batches(self) -> int:
        """Of a whole epoch."""
        return len(self.plan(0, ()).bounds) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, plan = self._now()
        reader = self.shards.reader()
        try:
            for number in range(worker, len(plan.bounds) - 1, workers):
                if (soon := number + AHEAD * workers) < len(plan.bounds) - 1:
                    reader.look_ahead(plan.batch(soon))
                yield self._batch(reader, plan.batch(number), epoch)
        finally:
            reader.close()

    def _batch(self, reader: SampleReader, indices: np.ndarray, epoch: int) -> dict[str, Any]:
        space = self.view.space(len(indices))
        samples: list[dict[str, Any]] = []
        skipped: list[str] = []
        for index in indices.tolist():
            try:
                raw = reader.read(index, self.view.fields)
                rest = self.view(raw, self.seed, epoch, index, space, len(samples))
                samples.append({"key": raw.key, "shard": raw.shard} | rest)
            except ShardError as error:
                if self.policy == "strict":
                    raise
                skipped.append(str(error))
        if not samples and len(indices) and not isinstance(self.view, EvalView):
            raise ShardError(f"all {len(indices)} samples of a batch are unreadable, the last: {skipped[-1]}")
        batch = collate(samples) if samples else {"key": [], "shard": []} | self.view.empty()
        images = {
            k: [t[: len(samples)] for t in v] if isinstance(v, list) else v[: len(samples)] for k, v in space.items()
        }
        return batch | images | {"skipped": skipped}


def _start_worker(worker: int) -> None:
    """The workers are the parallelism."""
    cv2.setNumThreads(0)
    threading.Thread(target=_end_when_the_run_says, daemon=True).start()


def _end_when_the_run_says() -> None:
    """A cluster signals the workers too, so SIGTERM counts from the parent process only; torch ends with 0 then."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class ShardLoader:
    """An iterable over a ShardDataset that knows its length and asks for the epoch when it starts one.

    It holds a DataLoader instead of being one, so that no trainer takes it apart to put a sampler in.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        epoch: Callable[[], int],
        num_workers: int,
        pin_memory: bool,
        prefetch: int,
        persistent: bool = True,
    ) -> None:
        self.dataset = dataset
        self._loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent and num_workers > 0,
            prefetch_factor=prefetch if num_workers else None,
            worker_init_fn=_start_worker,
        )
        self._epoch = epoch
        self._batches = dataset.num_batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.dataset.set_epoch(self._epoch())
        return self._start()

    def _start(self) -> Iterator[dict[str, Any]]:
        """Workers are born with these signals blocked; one to this process itself comes through right after."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        try:
            return iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ResumableLoader(ShardLoader):
    """A training loader that a checkpoint inside an epoch can take up again; Lightning asks for its state.

    Args:
        dataset: its plan takes what was done of the epoch.
        epoch: the epoch that the next ``iter`` starts or continues.
        batches: batches trained on so far in this epoch.
        world_size, batch: ranks, and samples a rank takes per batch.
    """

    def __init__(
        self, dataset: ShardDataset, epoch: Callable[[], int], num_workers: int, pin_memory: bool, prefetch: int,
        batches: Callable[[], int], world_size: int, batch: int,
    ) -> None:  # fmt: skip
        super().__init__(dataset, epoch, num_workers, pin_memory, prefetch)
        self._trained, self._world_size, self._batch = batches, world_size, batch
        self._done: list[Part] = []
        self._resumed_epoch = -1

    def state_dict(self) -> dict[str, Any]:
        """Which batches of which epoch were trained on, in parts by the number of ranks."""
        before = sum(part.batches for part in self._done)
        now = Part(self._world_size, self._batch, self._trained() - before)
        parts = [*self._done, now]
        if len(parts) > 1 and parts[-2][:2] == now[:2]:
            parts[-2:] = [now._replace(batches=parts[-2].batches + now.batches)]
        # the epoch that was read, not the trainer's, which has moved on when an epoch's end is saved
        return {"epoch": self.dataset.epoch, "parts": [list(part) for part in parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect at the next ``iter`` of that epoch."""
        self._done = [Part(*part) for part in state["parts"]]
        self._resumed_epoch = state["epoch"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = self._epoch()
        if self._done and epoch != self._resumed_epoch:
            self._done = []
        self.dataset.set_epoch(epoch, self._done)
        return self._start()


def normalize(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """(B, 3, H, W) uint8 on any device to (x / 255 - mean) / std in ``dtype``."""
    scale = torch.tensor(std, dtype=dtype, device=image.device).mul(255).reciprocal()[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=dtype, device=image.device)
    return torch.addcmul(shift[:, None, None], image.to(dtype), scale)
