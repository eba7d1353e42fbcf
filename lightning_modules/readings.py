"""Both readings of a frozen backbone: the stream that the published results read, and the other."""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from backbones import Backbone, Stream
from lightning_modules.frozen import FrozenBackboneModule

logger = logging.getLogger(__name__)
T = TypeVar("T")
Readings = Stream | Literal["both"]


class ReadsBoth(FrozenBackboneModule):
    """A frozen backbone whose blocks are read in one stream or, with ``stream=both``, in the published and the other.

    Args:
        backbone, backbone_weights, weights_key: see FrozenBackboneModule.
        stream: one of its streams, or ``both``; ``self.stream`` is the published one then.
    """

    def __init__(
        self,
        backbone: Backbone,
        backbone_weights: str | None,
        weights_key: str,
        stream: Readings = "published",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, "published" if stream == "both" else stream)
        other: Stream = "branch" if self.published_stream == "residual" else "residual"
        self.reads_both = stream == "both"
        self.other_stream: Stream | None = other if self.reads_both else None
        """What is read beside the published stream; None where that is all."""

    def read_other(self, read: Callable[[Stream], T]) -> T | None:
        """What ``read`` finds in the other stream; None where it is not read, or, said once, not there."""
        if self.other_stream is None:
            return None
        try:
            return read(self.other_stream)
        except ValueError as error:
            logger.warning("stream=both: %s; the published one alone is scored", error)
            self.other_stream = None
            return None
