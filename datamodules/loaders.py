"""Loaders of whole batches: they know their length, take up an epoch where it was cut off, and outlast signals."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import cv2
from torch.utils.data import DataLoader

from common.epoch_order import check_order
from datamodules.dataset import ShardDataset
from datamodules.position import Position
from datamodules.span_plan import EpochSegment

SENDERS = hasattr(signal, "sigwaitinfo") and hasattr(signal, "pthread_sigmask")
"""Whether the system tells who sent a signal; macOS and Windows do not, and there a signal ends the workers."""


def _start_worker(worker: int) -> None:
    """The workers are the parallelism."""
    cv2.setNumThreads(0)
    if SENDERS:
        threading.Thread(target=_end_when_the_run_says, daemon=True).start()


def _end_when_the_run_says() -> None:
    """A cluster signals the workers too, so SIGTERM counts from the parent process only; torch ends with 0 then."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class ShardLoader:
    """An iterable over a ShardDataset; for evaluation: each iteration is the same.

    It holds a DataLoader instead of being one, so that no trainer takes it apart to put a sampler in.

    Args:
        dataset: what makes the batches.
        num_workers: loading processes; 0 loads in this one.
        prefetch: batches each worker prepares ahead.
        pin_memory: whether batches come in page-locked memory, as suits a CUDA device.
        persistent: whether workers live on between iterations.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        num_workers: int = 0,
        prefetch: int = 4,
        pin_memory: bool = False,
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
        self._batches = dataset.num_batches

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.dataset.set_epoch(0)
        return self._start()

    def _start(self) -> Iterator[dict[str, Any]]:
        """Workers are born with these signals blocked; one to this process itself comes through right after."""
        if not SENDERS:
            return iter(self._loader)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        try:
            return iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ResumableLoader(ShardLoader):
    """A training loader that a checkpoint inside an epoch can take up again; Lightning asks for its state.

    Args:
        dataset: its plan takes what was done of the epoch.
        position: says which epoch an iteration starts or continues, and how many of its batches were trained on.
        batch: samples a rank takes per batch.
        num_workers, prefetch: see ShardLoader.
    """

    def __init__(
        self, dataset: ShardDataset, position: Position, batch: int, num_workers: int = 0, prefetch: int = 4
    ) -> None:
        super().__init__(dataset, num_workers, prefetch, position.pin_memory)
        self._position, self._batch = position, batch
        self._done: list[EpochSegment] = []
        self._resumed_epoch = -1

    def state_dict(self) -> dict[str, Any]:
        """Which batches of which epoch were trained on, in segments (``parts``) by the number of ranks."""
        before = sum(segment.batches for segment in self._done)
        now = EpochSegment(self._position.world_size, self._batch, self._position.batches - before)
        segments = [*self._done, now]
        if len(segments) > 1 and segments[-2][:2] == now[:2]:
            segments[-2:] = [now._replace(batches=segments[-2].batches + now.batches)]
        # the epoch that was read, not the trainer's, which has moved on when an epoch's end is saved
        parts = [list(segment) for segment in segments]
        return {"epoch": self.dataset.epoch, "parts": parts, "batches": len(self), "order": self._order()}

    def _order(self) -> dict[str, Any]:
        source, position = self.dataset.source, self._position
        return {
            "batch_size": self._batch * position.world_size * position.accumulate, "accumulate": position.accumulate,
            "seed": self.dataset.seed, "shuffle_window": getattr(self.dataset.plan, "window", None),
            "samples": len(source), "shards": len(source.lengths),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect at the next ``iter`` of that epoch. ValueError where what is left of it cannot be told."""
        self._done = [EpochSegment(*segment) for segment in state["parts"]]
        self._resumed_epoch = state["epoch"]
        batches = sum(segment.batches for segment in self._done)
        whole = batches >= state.get("batches", len(self))
        if batches and not whole:
            check_order(state.get("order", {}), self._order())
        self._position.restore(self._resumed_epoch + whole, 0 if whole else batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = self._position.start_epoch()
        if self._done and epoch != self._resumed_epoch:
            self._done = []
        self.dataset.set_epoch(epoch, self._done)
        return self._position.counted(self._start())
