"""What the families share whose resolution falls from stage to stage."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from backbones.base import Backbone, Features, Stream


class StageTrace(NamedTuple):
    """One stage at work, before the map is made smaller for the next."""

    residual: Tensor
    """(B, D_i, h_i, w_i) the stream after the stage's last block."""
    branch: Tensor | None = None
    """(B, D_i, h_i, w_i) what the last block's token mixer added to it; None where the family does not tell."""


class HierarchicalBackbone(Backbone):
    """A pyramid of stages without a class token: the embedding is the mean of the last map.

    A family gives :meth:`_stages`, and :meth:`_normalize` if its maps have norms of their own.
    """

    pools = ("avg", "")
    global_pool = "avg"

    @abstractmethod
    def _stages(self, images: Tensor) -> Iterator[Tensor | StageTrace]:
        """Runs the stages one after the other.

        Yields the map (B, D_i, h_i, w_i) after each, as ``feature_info`` says; or a StageTrace, where the family tells
        what its token mixers add.
        """

    def _traces(self, images: Tensor) -> Iterator[StageTrace]:
        for found in self._stages(images):
            yield found if isinstance(found, StageTrace) else StageTrace(found)

    def _normalize(self, stage: int, features: Tensor) -> Tensor:
        """(B, D_i, h_i, w_i) a stage's map behind the norm that it is published with; as it is, unless overridden."""
        return features

    def forward_features(self, images: Tensor) -> Features:
        *_, last = self._traces(images)
        return self._sorted(self.depth - 1, last.residual)

    def pooled_features(self, images: Tensor) -> Tensor:
        features = self.forward_features(images)
        return features.cls if self.global_pool else features.patches

    def forward_intermediates(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published", norm: bool = True
    ) -> list[Features]:
        wanted, read = self.block_indices(n), self.resolve_stream(stream)
        found = []
        for stage, trace in enumerate(self._traces(images)):
            if stage in wanted:
                features = trace.residual if read == "residual" else trace.branch
                if features is None:
                    raise ValueError(f"stream={stream!r}: {type(self).__name__} gives the residual stream only")
                found.append(self._sorted(stage, features, norm))
        return found

    def _sorted(self, stage: int, features: Tensor, norm: bool = True) -> Features:
        patches = self._normalize(stage, features) if norm else features
        return Features(patches.mean((2, 3)), patches)
