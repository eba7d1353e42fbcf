"""Whole and sliding inference against mmsegmentation's, in float64."""

import pytest
import torch
import torch.nn.functional as F

from heads.sliding import classes_at, segment_whole, segment_windows, windows
from tests.golden_files import golden_files
from tests.heads.test_segmentation_golden import close, opened


@golden_files("dense/seg_inference*.safetensors")
def test_inference_dense(path):
    tensors, config = opened(path)
    p = {k.removeprefix("in.model."): v for k, v in tensors.items() if k.startswith("in.model.")}

    def model(images):
        x = F.conv2d(images, p["backbone.conv.weight"], p["backbone.conv.bias"], stride=4).relu()
        x = F.conv2d(x, p["decode_head.convs.0.conv.weight"], p["decode_head.convs.0.conv.bias"], padding=1).relu()
        return F.conv2d(x, p["decode_head.conv_seg.weight"], p["decode_head.conv_seg.bias"])

    crop, stride = tuple(config["crop"]), tuple(config["stride"])
    for n, case in enumerate(config["cases"]):
        images = tensors[f"in.image{n}"]
        assert windows(tuple(images.shape[-2:]), crop, stride) == [
            tuple(w) for w in tensors[f"out.{n}.windows"].tolist()
        ]
        for at_once in (1, 4):
            found = {
                "whole": segment_whole(model, images),
                "slide": segment_windows(model, images, crop, stride, at_once),
            }
            for way, logits in found.items():
                close(logits, tensors[f"out.{n}.{way}.logits"], f"{n} {way}")
                assert torch.equal(classes_at(logits, tuple(case["ori"])), tensors[f"out.{n}.{way}.pred"].long())


@pytest.mark.parametrize("size", [(10, 7), (64, 65), (100, 131)])
def test_windows_cover_every_pixel_and_are_of_one_size(size):
    seen = torch.zeros(size)
    found = windows(size, (64, 64), (43, 30))
    for y1, x1, y2, x2 in found:
        seen[y1:y2, x1:x2] += 1
    assert seen.min() >= 1 and len({(y2 - y1, x2 - x1) for y1, x1, y2, x2 in found}) == 1
