"""Where a run stands, which is all that loaders ask of a Trainer."""

from collections.abc import Iterator
from typing import Any


class Position:
    """Where a run stands: which of its processes this is, and how far its training has come.

    A Trainer's is :class:`TrainerPosition`. One of this class belongs to a test or a notebook: each iteration of a
    training loader starts the next epoch, and a batch that was handed out counts as trained on. A Trainer that is given
    a loader of such a position, and not the data module, must write its checkpoints at the end of a batch.

    Args:
        rank, world_size: this process among those of the run.
        accumulate: batches whose gradients make one step.
        pin_memory: whether batches come in page-locked memory, as suits a CUDA device.
        epoch: the epoch that the first iteration of a training loader starts or continues.
        batches: batches trained on so far in that epoch.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        pin_memory: bool = False,
        epoch: int = 0,
        batches: int = 0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie in 0 … world_size-1, world_size={world_size}")
        self.rank, self.world_size, self.accumulate, self.pin_memory = rank, world_size, accumulate, pin_memory
        self._epoch, self._batches, self._started = epoch, batches, False

    @property
    def batches(self) -> int:
        """Batches trained on so far in the epoch."""
        return self._batches

    def start_epoch(self) -> int:
        """The epoch that an iteration of a training loader starts or continues; called as it begins."""
        if self._started:
            self._epoch, self._batches = self._epoch + 1, 0
        self._started = True
        return self._epoch

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an iteration, counted as they are handed out."""
        for batch in batches:
            self._batches += 1
            yield batch

    def restore(self, epoch: int, batches: int) -> None:
        """What a training loader's state says of where it was: the next iteration goes on there."""
        self._epoch, self._batches, self._started = epoch, batches, False


class TrainerPosition(Position):
    """A Trainer's, read when it is asked for."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(
            trainer.global_rank,
            trainer.world_size,
            trainer.accumulate_grad_batches,
            trainer.strategy.root_device.type == "cuda",
        )
        self._trainer = trainer

    @property
    def batches(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.processed

    def start_epoch(self) -> int:
        """Not ``trainer.current_epoch``: a checkpoint from an epoch's end leaves that behind until training starts."""
        return self._trainer.fit_loop.epoch_progress.current.processed

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """As they are: the Trainer counts."""
        return batches

    def restore(self, epoch: int, batches: int) -> None:
        """Nothing: the Trainer's counters come out of its checkpoint."""
