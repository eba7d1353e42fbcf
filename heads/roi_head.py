"""What cascades of box and mask heads and single ones share: candidates, losses, refinement, detections.

Shapes: B images, n boxes over all images, P positives of them, m boxes of an image's ground truth, K classes,
S side of a mask (28).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heads.bbox_head import BBoxHead
from heads.boxes import Sizes, assign, grouped_nms, sample
from heads.mask_head import MaskHead, mask_loss, mask_targets, of_class, paste_masks
from heads.roi_align import roi_features, with_image

Targets = Sequence[dict[str, Tensor]]


@dataclass
class Candidates:
    """The boxes of an image that a stage is trained on, positives first.

    Args:
        boxes: (n, 4).
        labels: (n), K for background.
        matched: (P) which box of the truth a positive stands for, from 0.
        is_truth: (n) it is a box of the truth itself.
    """

    boxes: Tensor
    labels: Tensor
    matched: Tensor
    is_truth: Tensor


@dataclass
class Stage:
    """What a stage saw and said in training; rows by image, positives first.

    Args:
        candidates: of each image.
        rois: (n, 5) image, box.
        labels: (n), K for background.
        targets: (n, 4) encoded boxes, 0 where background.
        logits: (n, K + 1).
        deltas: (n, 4) or (n, 4·K).
        mask_targets: (P, S, S) booleans.
        mask_logits: (P, K, S, S).
        losses: with the stage's weight applied, and ``acc`` in percent.
        refined: (n_b, 4) of each image, what the next stage is given; empty for the last stage.
    """

    candidates: list[Candidates]
    rois: Tensor
    labels: Tensor
    targets: Tensor
    logits: Tensor
    deltas: Tensor
    mask_targets: Tensor
    mask_logits: Tensor
    losses: dict[str, Tensor]
    refined: list[Tensor] = field(default_factory=list)


class RoIHead(nn.Module, ABC):
    """Stages of box and mask heads; :meth:`stages` says which.

    Args:
        ious: IoU of each stage from which a candidate is positive; below it is background.
        loss_weights: of each stage.
        best_iou: see :func:`heads.boxes.assign`.
        num_samples: candidates trained on in an image, the ground truth's boxes among them.
        positive_fraction: at most, of these.
        strides: of the levels read, in pixels.
        finest_scale: see :func:`heads.roi_align.roi_features`.
        score_threshold: detections score strictly more.
        nms_iou: an IoU strictly over it suppresses, within a class.
        max_detections: of an image.
    """

    def __init__(
        self, ious: Sequence[float], loss_weights: Sequence[float], best_iou: float | None, num_samples: int,
        positive_fraction: float, strides: Sequence[int], finest_scale: float, score_threshold: float, nms_iou: float,
        max_detections: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ious, self.loss_weights, self.best_iou = tuple(ious), tuple(loss_weights), best_iou
        self.num_samples, self.positive_fraction = num_samples, positive_fraction
        self.strides, self.finest_scale = tuple(strides), finest_scale
        self.score_threshold, self.nms_iou, self.max_detections = score_threshold, nms_iou, max_detections

    @abstractmethod
    def stages(self) -> list[tuple[str, BBoxHead, MaskHead]]:
        """Prefix of the losses' names, box head and mask head of each stage."""

    def _features(self, levels: Sequence[Tensor], rois: Tensor, size: int) -> Tensor:
        return roi_features(levels[: len(self.strides)], rois, size, self.strides, self.finest_scale)

    @torch.no_grad()
    def _candidates(
        self, proposals: Tensor, truth: dict[str, Tensor], iou: float, num_classes: int,
        generator: torch.Generator | None,
    ) -> Candidates:  # fmt: skip
        """The boxes of the truth, each standing for itself, and the proposals; then the sampler's choice."""
        own = truth["boxes"].to(proposals)
        assigned = assign(proposals, own, iou, iou, self.best_iou)
        assigned = torch.cat([torch.arange(1, len(own) + 1, device=assigned.device), assigned])
        positive, background = sample(assigned, self.num_samples, self.positive_fraction, generator)
        matched = assigned[positive] - 1
        labels = torch.cat([truth["labels"].to(matched)[matched], torch.full_like(background, num_classes)])
        chosen = torch.cat([positive, background])
        return Candidates(torch.cat([own, proposals])[chosen], labels, matched, chosen < len(own))

    def train_stages(
        self, levels: Sequence[Tensor], proposals: Sequence[Tensor], targets: Targets, sizes: Sizes,
        generator: torch.Generator | None = None,
    ) -> Iterator[Stage]:  # fmt: skip
        """The stages in turn, each trained on what the one before refined.

        Args:
            levels: maps (B, C, h, w), from the finest; those beyond ``strides`` are not read.
            proposals: boxes (n, 4) of each image, possibly none.
            targets: of each image: ``boxes`` (m, 4), ``labels`` (m) below K, ``masks`` (m, H, W) bitmaps.
            sizes: (h, w) of each image without padding, to which boxes are clipped.
            generator: of :func:`heads.boxes.sample`.
        """
        proposals = [boxes.detach() for boxes in proposals]
        settings = list(zip(self.stages(), self.ious, self.loss_weights, strict=True))
        for number, ((_, box_head, mask_head), iou, weight) in enumerate(settings):
            candidates = [
                self._candidates(boxes, truth, iou, box_head.num_classes, generator)
                for boxes, truth in zip(proposals, targets, strict=True)
            ]
            rois, labels = with_image([c.boxes for c in candidates]), torch.cat([c.labels for c in candidates])
            logits, deltas = box_head(self._features(levels, rois, box_head.size))
            ends = torch.zeros(len(rois), 4, dtype=torch.float32, device=rois.device)
            positive = labels < box_head.num_classes
            matched = [t["boxes"].to(rois)[c.matched] for t, c in zip(targets, candidates, strict=True)]
            ends[positive] = box_head.coder.encode(rois[positive, 1:], torch.cat(matched))
            losses = box_head.loss(logits, deltas, labels, ends)

            masks = [
                mask_targets(t["masks"].to(rois.device), c.boxes[: len(c.matched)], c.matched)
                for t, c in zip(targets, candidates, strict=True)
            ]
            mask_logits = mask_head(self._features(levels, rois[positive], 2 * box_head.size))
            losses["loss_mask"] = mask_loss(mask_logits, torch.cat(masks), labels[positive])
            losses = {name: value * weight if "loss" in name else value for name, value in losses.items()}
            stage = Stage(candidates, rois, labels, ends, logits, deltas, torch.cat(masks), mask_logits, losses)
            if number + 1 < len(settings):
                moved = self._refine(box_head, [c.boxes for c in candidates], logits, deltas, sizes, labels)
                stage.refined = proposals = [b[~c.is_truth] for b, c in zip(moved, candidates, strict=True)]
            yield stage

    def loss(
        self, levels: Sequence[Tensor], proposals: Sequence[Tensor], targets: Targets, sizes: Sizes,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """``loss_cls``, ``loss_bbox``, ``loss_mask`` with the stage's weight and ``acc`` in percent of every stage.

        Arguments are those of :meth:`train_stages`.
        """
        passed = self.train_stages(levels, proposals, targets, sizes, generator)
        return {
            prefix + name: value
            for (prefix, _, _), stage in zip(self.stages(), passed, strict=True)
            for name, value in stage.losses.items()
        }

    @staticmethod
    @torch.no_grad()
    def _refine(
        head: BBoxHead, boxes: Sequence[Tensor], logits: Tensor, deltas: Tensor, sizes: Sizes,
        labels: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Boxes of each image moved by their deltas: those of the label, or of the likeliest class where that is K."""
        counts = [len(b) for b in boxes]
        likeliest = logits[:, :-1].argmax(1)
        chosen = likeliest if labels is None else torch.where(labels < head.num_classes, labels, likeliest)
        found = head.of_class(deltas, chosen).split(counts)
        return [head.coder.decode(b, d, size) for b, d, size in zip(boxes, found, sizes, strict=True)]

    @torch.no_grad()
    def test_stages(
        self, levels: Sequence[Tensor], proposals: Sequence[Tensor], sizes: Sizes
    ) -> list[tuple[list[Tensor], Tensor, Tensor]]:
        """Boxes (n_b, 4) of each image, logits (n, K + 1) and deltas of every stage, each on refined boxes."""
        boxes, found = list(proposals), []
        heads = self.stages()
        for number, (_, head, _) in enumerate(heads):
            logits, deltas = head(self._features(levels, with_image(boxes), head.size))
            found.append((boxes, logits, deltas))
            if number + 1 < len(heads):
                boxes = self._refine(head, boxes, logits, deltas, sizes)
        return found

    @torch.no_grad()
    def detect(
        self, levels: Sequence[Tensor], proposals: Sequence[Tensor], sizes: Sizes
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Boxes (d, 4), scores (d) by falling score and labels (d) of each image, in the frame of its input.

        Classes come of the mean of the stages' logits, boxes of the last stage. A box may appear under several classes.
        """
        passed = self.test_stages(levels, proposals, sizes)
        boxes, _, deltas = passed[-1]
        counts, head = [len(b) for b in boxes], self.stages()[-1][1]
        probabilities = torch.stack([logits for _, logits, _ in passed]).mean(0).softmax(1)[:, :-1]
        found = []
        for box, delta, scores, size in zip(
            boxes, deltas.split(counts), probabilities.split(counts), sizes, strict=True
        ):
            moved = head.coder.decode(box, delta, size).unflatten(1, (delta.shape[1] // 4, 4))
            row, label = torch.nonzero(scores > self.score_threshold, as_tuple=True)
            kept_boxes = moved[row, 0 if head.class_agnostic else label]
            kept = grouped_nms(kept_boxes, scores[row, label], label, self.nms_iou)[: self.max_detections]
            found.append((kept_boxes[kept], scores[row, label][kept], label[kept]))
        return found

    @torch.no_grad()
    def mask_probabilities(
        self, levels: Sequence[Tensor], boxes: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> list[Tensor]:
        """(d, S, S) of each image: the mean over the stages' mask heads of the probabilities of the boxes' classes."""
        rois, label = with_image(boxes), torch.cat(list(labels))
        summed = [
            of_class(mask_head(self._features(levels, rois, 2 * box_head.size)), label).sigmoid()
            for _, box_head, mask_head in self.stages()
        ]
        return list(torch.stack(summed).mean(0).split([len(b) for b in boxes]))

    @torch.no_grad()
    def predict(
        self, levels: Sequence[Tensor], proposals: Sequence[Tensor], sizes: Sizes, original_sizes: Sizes
    ) -> list[dict[str, Tensor]]:
        """Detections of each image in its original frame, by falling score.

        Args:
            levels, proposals: as in :meth:`train_stages`.
            sizes: (h, w) of each image as it was given, without padding.
            original_sizes: (h, w) of each before it was resized.

        Returns:
            Of each image: ``boxes`` (d, 4), ``scores`` (d), ``labels`` (d) and ``masks`` (d, h, w) booleans of the
            original size.
        """
        detected = self.detect(levels, proposals, sizes)
        probabilities = self.mask_probabilities(levels, [d[0] for d in detected], [d[2] for d in detected])
        results = []
        for (boxes, scores, labels), masks, size, original in zip(
            detected, probabilities, sizes, original_sizes, strict=True
        ):
            scale = boxes.new_tensor([size[1] / original[1], size[0] / original[0]]).repeat(2)
            boxes = boxes / scale
            masks = paste_masks(masks, boxes, original)
            results.append({"boxes": boxes, "scores": scores, "labels": labels, "masks": masks})
        return results
