"""The page of Tables 2 and 3: rows, intervals, pictures, curves."""

import json

import numpy as np
import pytest
import torch

from analysis import dense, renderers
from analysis.runs import find_run
from experiments import spec
from metrics import segmentation_scores
from tests.analysis.runs import write_run

CLASSES = 4


def areas_of(rng, images):
    """(images, 3, CLASSES): found rightly, found, there."""
    there = rng.integers(50, 100, (images, CLASSES))
    right = (there * rng.uniform(0.2, 0.9, (images, CLASSES))).astype(int)
    return np.stack([right, right + rng.integers(0, 50, (images, CLASSES)), there], 1)


def pictures(rng, maps):
    shape = (6, 8) if maps else (6, 8, 3)
    found = {}
    for kind in ("worst", "best"):
        for i in range(2):
            found |= {
                f"{kind}{i}_image": rng.integers(0, 255, (6, 8, 3)).astype(np.uint8),
                f"{kind}{i}_target": rng.integers(0, CLASSES, shape).astype(np.uint8),
                f"{kind}{i}_predicted": rng.integers(0, CLASSES, shape).astype(np.uint8),
                f"{kind}{i}_score": np.float64(0.5), f"{kind}{i}_key": np.array("a"),
            }  # fmt: skip
    return found


def row(metric, value, number=None):
    return {
        "metric": metric, "class": number, "name": None if number is None else f"c{number}", "value": value, "images": 9,
    }  # fmt: skip


@pytest.fixture
def segmented(tmp_path):
    rng = np.random.default_rng(0)
    for model in ("linear_vit_demo", "vim_demo", "vit_demo"):
        areas = areas_of(rng, 9)
        scores = segmentation_scores(torch.from_numpy(areas).sum(0))
        rows = [row("mIoU", scores["mIoU"].item()), row("mAcc", scores["mAcc"].item())]
        rows += [row("IoU", value, i) for i, value in enumerate(scores["IoU"].tolist())]
        arrays = {"areas": areas, "keys": np.array([f"k{i}" for i in range(9)])} | pictures(rng, True)
        write_run(tmp_path, model, "segmentation", rows, arrays=arrays)
    return tmp_path


def test_segmentation(segmented):
    (target,) = spec.targets(["table2"], "demo")
    paths = renderers.draw(target, segmented)
    assert {p.name for p in paths} >= {"table2.json", "table2.md", "table2-pictures.png", "table2-classes.png"}
    rows = json.loads((segmented / "table2.json").read_text())["rows"]
    assert [(r["model"], r["what"]) for r in rows] == [
        (m, w) for m in ("LinearViT", "Vim", "ViT") for w in ("mIoU", "mAcc")
    ]  # classes are in the picture
    text = (segmented / "table2.md").read_text()
    assert "Vim − LinearViT" in text and "ViT − Vim" in text and "## How sure" in text


def test_intervals_are_those_of_images_drawn_anew(segmented):
    run = find_run(segmented / "vim_demo-segmentation")
    found = dense.image_draws(run)
    areas, rng = run.kept_arrays["areas"], np.random.default_rng(1)
    brute = []
    for _ in range(500):
        right, predicted, there = areas[rng.integers(9, size=9)].sum(0)
        brute.append((right / (predicted + there - right)).mean())
    assert len(found) == dense.DRAWS
    np.testing.assert_allclose(np.quantile(found, [0.1, 0.5, 0.9]), np.quantile(brute, [0.1, 0.5, 0.9]), atol=0.01)
    (target,) = spec.targets(["table2"], "demo")
    runs = target.found(segmented)
    lines = {line["what"]: line for line in dense.interval_rows(target, runs)}
    gap = 100 * (dense._mean_iou(runs[2]) - dense._mean_iou(runs[1]))
    assert lines["ViT − Vim"]["value"] == f"{gap:+.1f}"


def test_detection(tmp_path):
    rng = np.random.default_rng(0)
    curve = np.linspace(1, 0, 101)
    for model in ("vim_demo", "vit_demo"):
        rows = [row("APb", 0.4), row("APm_small", 0.1), row("APb", 0.5, 0), row("APm", 0.3, 2)]
        arrays = {f"precision_{kind}": np.stack([curve] * 3) for kind in ("bbox", "segm")} | pictures(rng, False)
        write_run(tmp_path, model, "detection", rows, arrays=arrays)
    (target,) = spec.targets(["table3"], "demo")
    paths = renderers.draw(target, tmp_path)
    assert {p.name for p in paths} >= {"table3-curves.png", "table3-classes.png", "table3-pictures.pdf", "table3.html"}
    rows = json.loads((tmp_path / "table3.json").read_text())["rows"]
    assert [(r["model"], r["what"], r.get("ours")) for r in rows] == [
        ("LinearViT", "", None), ("Vim", "APb", 40.0), ("Vim", "APm, small", 10.0), ("ViT", "APb", 40.0),
        ("ViT", "APm, small", 10.0),
    ]  # fmt: skip
    assert "How sure" not in (tmp_path / "table3.md").read_text()
