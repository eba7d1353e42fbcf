"""Randomness that belongs to a sample and not to a worker."""

import random
from typing import NamedTuple

import numpy as np


class SampleKey(NamedTuple):
    """What a sample's augmentation is a function of."""

    seed: int
    epoch: int
    number: int
    """The sample's number over all shards of its split."""

    @property
    def philox(self) -> tuple[np.uint64, np.uint64]:
        """As the key of a Philox generator."""
        return np.uint64(self.seed % 2**64), np.uint64(self.epoch << 40 | self.number)

    def generator(self) -> np.random.Generator:
        """A new generator of this sample's own: the same draws in whatever worker, run or order."""
        return np.random.Generator(np.random.Philox(key=self.philox))


class SampleSeed:
    """One generator for many transforms, set anew for each sample by its key.

    Philox is counter-based: setting its key costs microseconds, and streams of different keys are independent.

    Attributes:
        numpy, python: the generators to draw from; the second is seeded by the first.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self.numpy = np.random.Generator(self._philox)
        self.python = random.Random(0)
        self._state = self._philox.state

    def set(self, seed: int, epoch: int, index: int) -> None:
        """The stream of a sample: a function of (seed, epoch, index) alone."""
        self._state["state"]["key"][:] = SampleKey(seed, epoch, index).philox
        self._state["state"]["counter"][:] = 0
        self._state["buffer_pos"] = 4  # the buffer of the previous sample is spent
        self._state["has_uint32"], self._state["uinteger"] = 0, 0
        self._philox.state = self._state
        self.python.seed(int(self.numpy.integers(2**63)))
