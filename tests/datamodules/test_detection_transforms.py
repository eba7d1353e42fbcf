"""Parts of detection's transforms by themselves, and what they refuse."""

import json

import numpy as np
import pytest

from datamodules import WindowRule
from datamodules.detection_transforms import DetectionEvaluation, DetectionTraining, Scene, drawn_window, padded_size
from datamodules.sample_seed import SampleKey
from datamodules.samples import RawSample, ShardError
from tests.datamodules.published_layouts import save_jpg


def test_a_window_shows_what_it_shows():
    rng = np.random.default_rng(0)
    masks = np.zeros((6, 50, 70), np.uint8)
    boxes = []
    for mask in masks:
        x, y = rng.integers(0, 60), rng.integers(0, 40)
        w, h = rng.integers(1, 70 - x + 1), rng.integers(1, 50 - y + 1)
        mask[y : y + h, x : x + w] = 1
        boxes.append([x, y, x + w, y + h])
    scene = Scene(rng.integers(0, 255, (50, 70, 3), dtype=np.uint8), np.array(boxes, np.float32), np.arange(6), masks)
    gone = 0
    for _ in range(100):
        rows, columns = drawn_window((50, 70), (10, 30), rng)
        assert 10 <= rows.stop - rows.start <= 30 and 10 <= columns.stop - columns.start <= 30
        assert 0 <= rows.start < rows.stop <= 50 and 0 <= columns.start < columns.stop <= 70
        seen = scene.window(rows, columns)
        there = [i for i in range(6) if masks[i, rows, columns].any()]
        assert seen.labels.tolist() == there
        np.testing.assert_array_equal(seen.masks, masks[there][:, rows, columns])
        for box, mask in zip(seen.boxes, seen.masks, strict=True):  # these boxes are as tight as the window leaves them
            y, x = np.nonzero(mask)
            assert box.tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]
        gone += 6 - len(there)
    assert gone > 50
    rows, columns = drawn_window((8, 20), (10, 15), rng)
    assert (rows.start, rows.stop) == (0, 8) and 10 <= columns.stop - columns.start <= 15


SAID = {"id": 1, "file_name": "x", "width": 60, "height": 40, "annotations": []}


@pytest.mark.parametrize(
    ("json_text", "message"),
    [
        (None, r"sample 'k' in shard s has no .json member"),
        ("{", r"its .json does not say which objects it has \(JSONDecodeError"),
        (json.dumps({"id": 1}), r"does not say which objects it has \(KeyError\('annotations'\)"),
        (json.dumps(SAID | {"annotations": [{"bbox": [1, 2, 3]}]}), r"does not say which objects"),
        (json.dumps(SAID | {"width": 61}), r"its .json is of an image of 61 x 40, the image is 60 x 40"),
        (
            json.dumps(SAID | {"annotations": [
                {"bbox": [1, 2, 3, 4], "label": 0, "iscrowd": 0, "area": 1, "rle": {"size": [60, 40], "counts": "0"}}
            ]}),
            r"a mask is of \(height, width\) \(60, 40\), the image of \(40, 60\)",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sample(tmp_path, json_text, message):
    save_jpg(tmp_path / "x.jpg", (60, 40))
    fields = {"jpg": (tmp_path / "x.jpg").read_bytes()} | ({} if json_text is None else {"json": json_text.encode()})
    for transform in (DetectionTraining(), DetectionEvaluation()):
        with pytest.raises(ShardError, match=message):
            transform(RawSample("s", "k", fields), SampleKey(0, 0, 0), {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DetectionTraining(flip=1.5), r"flip=1.5; allowed: 0 to 1"),
        (lambda: DetectionTraining(scales=(0,)), r"scales=\[0\]; allowed: positive sides"),
        (lambda: DetectionEvaluation(resize=(0, 5)), r"resize=\[0, 5\]; allowed: positive sides"),
        (lambda: DetectionEvaluation(divisor=0), r"divisor=0; allowed: 1 and more"),
        (lambda: WindowRule(scales=()), r"window.scales=\[\]; allowed: one positive side or more"),
        (lambda: WindowRule(sides=(9, 3)), r"window.sides=\[9, 3\]; allowed: two positive sides, the shorter first"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_padding():
    assert padded_size([(30, 64), (65, 1)], 32) == (96, 64) and padded_size([(30, 64)], 1) == (30, 64)
