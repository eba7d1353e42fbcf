"""Augmentations of dense tasks against mmsegmentation's, draw by draw."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from datamodules import dense_ops
from tests.golden_files import golden_files, present


class Script:
    """Answers draws by a list, and keeps what was asked."""

    def __init__(self, answers):
        self.answers, self.asked = list(answers), []

    def integers(self, low, high):
        self.asked.append(["randint", high] if low == 0 else ["randint", low, high])
        return self.answers.pop(0)

    def uniform(self, low, high):
        self.asked.append(["uniform", low, high])
        return self.answers.pop(0)


@pytest.fixture
def golden(path):
    with safe_open(present(path), "np") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["config"])


@golden_files("dense/augment*.safetensors")
def test_sizes_dense(golden):
    tensors, config = golden
    for (width, height, ratio), row in zip(config["size_cases"], tensors["out.sizes"].tolist(), strict=True):
        target = dense_ops.drawn_target((2048, 512), (0.5, 2.0), Script([ratio]))
        assert [*target, *dense_ops.scaled_size((width, height), target)] == row


@golden_files("dense/augment*.safetensors")
def test_resizing_dense(golden):
    tensors, config = golden
    image, labels = tensors["in.bgr"][..., ::-1], tensors["in.label"]
    size = dense_ops.scaled_size(labels.shape[::-1], tuple(config["resize_to"]))
    np.testing.assert_array_equal(
        dense_ops.resize_image(np.ascontiguousarray(image), size)[..., ::-1], tensors["out.resize.image"]
    )
    np.testing.assert_array_equal(dense_ops.resize_labels(labels, size), tensors["out.resize.label"])


@golden_files("dense/augment*.safetensors")
def test_crops_dense(golden):
    tensors, config = golden
    for offsets, row in zip(config["crop_offsets"], tensors["out.crop.y1y2x1x2_and_draws"].tolist(), strict=True):
        draws = Script(v for pair in offsets for v in pair)
        y, x = dense_ops.crop_window(tensors["in.label"], tuple(config["crop"]), 255, draws)
        height, width = tensors["in.label"].shape
        assert [y.start, min(y.stop, height), x.start, min(x.stop, width), len(draws.asked) // 2] == row


@golden_files("dense/augment*.safetensors")
def test_photometric_distortion_dense(golden):
    tensors, config = golden
    image = np.ascontiguousarray(tensors["in.bgr"][..., ::-1])
    for number, (answers, asked) in enumerate(zip(config["photometric"], config["photometric_asked"], strict=True)):
        draws = Script(answers)
        found = dense_ops.distort(image, draws)
        assert draws.asked == asked and not draws.answers
        np.testing.assert_array_equal(found[..., ::-1], tensors[f"out.photometric.{number}"])


def test_a_short_side_stays_and_a_window_without_classes_is_taken_after_ten():
    labels = np.full((20, 50), 255)
    draws = Script([0, 5] * 11)
    y, x = dense_ops.crop_window(labels, (30, 30), 255, draws)
    assert labels[y, x].shape == (20, 30) and len(draws.asked) == 22
