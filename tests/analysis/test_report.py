"""The demo's report from runs of the test's making."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from analysis import report
from tests.analysis.runs import map_row


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(0)
    for model, top1, auc in (("untrained", 0.3, 0.45), ("pretrained", 0.5, 0.35)):
        rows = {
            "probe": [{"head": "a", "top1_last": top1 - 0.1}, {"head": "b", "top1_last": top1}],
            "knn": [{"k": 20, "top1": top1 + 0.05}],
            "auc": [
                map_row(name, a) | {"auc_normalized": 0.7, "images": 9}
                for name, a in (("block2/similarity", 0.99), ("block3/mixing", 0.9), ("block3/similarity", auc))
            ]
            + [map_row("shuffled", 0.501) | {"auc_normalized": 0.58, "images": 9}, map_row("position", 0.612)],
        }
        for stage, content in rows.items():
            folder = tmp_path / f"{model}-{stage}"
            folder.mkdir()
            (folder / "results.json").write_text(json.dumps({"rows": content}))
            started = "2026-01-31T23:59:59+0000" if model == "untrained" else "2026-02-01T09:00:00+0000"
            (folder / "run.json").write_text(json.dumps({"started": started, "seconds": 2.0}))
        masks = np.zeros((2, 48, 48), np.int32)
        masks[:, 10:30, 10:30] = 3
        images = rng.integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
        arrays = {"images": images, "masks": masks, "maps/block3/similarity": rng.normal(size=(2, 6, 6))}
        np.savez(tmp_path / f"{model}-auc/results.npz", **arrays)
    pretrain = tmp_path / "pretrain"
    pretrain.mkdir()
    (pretrain / "config.yaml").write_text("seed_everything: 7\nmodel: x\n")
    record = {"started": "2026-01-31T23:59:00+0000", "seconds": 60.0, "revision": "abc", "versions": {"torch": "2"}}
    (pretrain / "run.json").write_text(json.dumps(record))
    writer = EventFileWriter(str(pretrain))
    for step in range(4):
        values = {
            "train/loss": 5 - step,
            "train/kl": 1.0,
            "val/knn_top1": 0.1 * step,
            "perf/images_per_second": 90 + step,
        }
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        writer.add_event(Event(step=step, summary=summary, wall_time=step))
    writer.close()
    return tmp_path


def test_report(run, capsys):
    report.main(run)
    found = json.loads((run / "report.json").read_text())
    assert found["untrained"]["linear_top1"] == pytest.approx(30) and found["pretrained"]["knn_top1"] == pytest.approx(
        55
    )
    assert found["pretrained"]["auc"] == 0.35 and found["pretrained"]["auc_of_mean_normalized"] == 0.65
    assert found["position_auc"] == 0.612 and found["shuffled_auc"] == 0.501 and found["seed"] == 7
    assert found["images_per_second"] == pytest.approx(91.5) and found["wall_seconds"] == 63  # stages overlap
    table = capsys.readouterr().out
    assert "+20.0" in table and "+0.100" in table and "tensorboard --logdir" in table
    page = (run / "report.html").read_text()
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 2 and all(s.startswith("data:image/png;base64,") for s in sources)
    assert not re.findall(r'(?:href|src)="(?!data:)', page)  # needs no other file
    assert "Shown negated" in page and "last block, branch stream" in page
    for name in ("maps.png", "curves.png"):
        assert min(Image.open(run / name).size) > 200


def test_a_missing_stage_is_named(run):
    (run / "pretrained-knn/results.json").unlink()
    with pytest.raises(ValueError, match=r"pretrained-knn/results.json is missing: run make demo"):
        report.main(run)
