"""mIoU against mmsegmentation's numbers and sklearn's."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from metrics import SegmentationScores, segmentation_areas
from tests.golden_files import golden_files
from tests.heads.test_segmentation_golden import opened
from tests.processes import run_ranks


def reduced(raw):
    """Class k of ADE20K's files is k - 1; 0 and 255 are none."""
    return torch.where((raw == 0) | (raw == 255), 255, raw.long() - 1)


@golden_files("dense/seg_metric*.safetensors")
def test_scores_dense(path):
    tensors, config = opened(path)
    labels, predicted = reduced(tensors["in.raw_label"]), tensors["in.pred"].long()
    assert torch.equal(labels, tensors["out.label"].long())
    areas = segmentation_areas(predicted, labels, config["classes"], config["ignore_index"])
    right, found, there = areas.unbind(1)
    for name, ours in (("intersect", right), ("pred", found), ("label", there), ("union", found + there - right)):
        assert torch.equal(ours.double(), tensors[f"out.area_per_image.{name}"])
    for batches in ([[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]]):
        metric = SegmentationScores(config["classes"], config["ignore_index"])
        for rows in batches:
            metric.update(predicted[rows], labels[rows])
        scores = metric.compute()
        for name in ("IoU", "Acc", "mIoU", "mAcc", "aAcc"):
            torch.testing.assert_close(scores[name].double(), tensors[f"out.{name}"], rtol=0, atol=1e-6, equal_nan=True)
        for name in ("mIoU", "mAcc", "aAcc"):
            assert round(100 * scores[name].item(), 2) == round(tensors[f"out.printed_percent.{name}"].item(), 2)


def drawn(seed, images=6, classes=5):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images, 9, 11), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.2] = 255
    return torch.randint(0, classes, labels.shape, generator=g), labels


def test_areas_are_those_of_a_confusion_matrix():
    predicted, labels = drawn(0)
    for image, areas in enumerate(segmentation_areas(predicted, labels, 5)):
        counted = labels[image] != 255
        matrix = confusion_matrix(labels[image][counted], predicted[image][counted], labels=range(5))
        np.testing.assert_array_equal(areas, [np.diag(matrix), matrix.sum(0), matrix.sum(1)])


def _scores_of(rank, shares):
    torch.set_num_threads(1)
    predicted, labels = drawn(1)
    metric = SegmentationScores(5)
    for image in shares[rank]:
        metric.update(predicted[image : image + 1], labels[image : image + 1])
    return {name: value.tolist() for name, value in metric.compute().items()}


@pytest.mark.parametrize(
    "shares", [[[0, 1], [2, 3, 4, 5]], [[0, 1, 2], [], [3, 4, 5]]], ids=["two", "three, one empty"]
)
def test_scores_do_not_depend_on_the_processes(shares):
    alone = _scores_of(0, [range(6)])
    for found in run_ranks(_scores_of, len(shares), shares):
        assert found == alone


def test_other_classes_are_refused():
    with pytest.raises(ValueError, match="labels holds the class 7; allowed are 0 to 4"):
        segmentation_areas(torch.zeros(1, 2, 2), torch.full((1, 2, 2), 7), 5)
