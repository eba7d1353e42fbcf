"""Some samples of a source, as a source of its own."""

from collections.abc import Sequence

import numpy as np

from datamodules.samples import Labels, RawSample, SampleReader, Source


class Selection(Source):
    """Those samples of a source that are chosen, in its order and its pieces.

    Plans count what is chosen and nothing else, so that the steps of an epoch are known before it begins: a sample that
    were only left out on reading would be missing from its batch.

    Args:
        source: all samples.
        chosen: (samples) bool.
        groups: (samples) of all of them, see :class:`~datamodules.samples.Source`; None for no groups.
    """

    def __init__(self, source: Source, chosen: np.ndarray, groups: np.ndarray | None = None) -> None:
        if chosen.shape != (len(source),) or (groups is not None and groups.shape != chosen.shape):
            raise ValueError(f"a selection of {len(source)} samples needs as many values; there are {chosen.shape}")
        self.source, self.fields, self.paths = source, source.fields, source.paths
        self.numbers = np.flatnonzero(chosen)
        self.starts = np.searchsorted(self.numbers, source.starts)
        self.lengths = np.diff(self.starts)
        self.groups = None if groups is None else groups[self.numbers]

    @property
    def labels(self) -> Labels | None:
        """Of the whole source."""
        return self.source.labels

    @property
    def classes(self) -> Sequence[str] | None:
        return self.source.classes

    def reader(self) -> "SelectionReader":
        return SelectionReader(self.source.reader(), self.numbers)


class SelectionReader:
    """Reads by the numbers that samples have in the selection."""

    def __init__(self, reader: SampleReader, numbers: np.ndarray) -> None:
        self._reader, self._numbers = reader, numbers

    def read(self, index: int, fields: Sequence[str]) -> RawSample:
        return self._reader.read(int(self._numbers[index]), fields)

    def look_ahead(self, indices: np.ndarray) -> None:
        self._reader.look_ahead(self._numbers[indices])

    def close(self) -> None:
        self._reader.close()
