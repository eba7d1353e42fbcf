"""The demo over seeds: each seed's own numbers, and gains that follow from them."""

import json

import pytest

from analysis.demo_seeds import main
from metrics.effects import effect


def write_report(run, seed, gain):
    scores = {"linear_top1": 20.0 + seed, "knn_top1": 30.0, "auc_of_mean_normalized": 0.5}
    after = {
        "linear_top1": 20.0 + seed + gain,
        "knn_top1": 30.0 - gain,
        "auc_of_mean_normalized": 0.5 + gain / 100,
        "auc": 0.25,
    }
    report = {"seed": seed, "untrained": scores, "pretrained": after, "wall_seconds": 200.4}
    run.mkdir()
    (run / "report.json").write_text(json.dumps(report | {"shuffled_auc": 0.5, "position_auc": 0.6}))


def test_table(tmp_path, capsys):
    gains = {1: 40.0, 0: 20.0, 2: 33.0}
    for seed, gain in gains.items():
        write_report(tmp_path / f"demo-{seed}", seed, gain)
    main([*(str(tmp_path / f"demo-{seed}") for seed in gains), "--out", str(tmp_path / "seeds.md")])
    text = capsys.readouterr().out
    assert (tmp_path / "seeds.md").read_text() == text
    lines = text.splitlines()
    assert lines[2] == "| 0 | 20.0 → 40.0 | 30.0 → 10.0 | 0.500 → 0.700 | 0.250 | 0.500 | 0.600 | 200 |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| 0", "| 1", "| 2"]
    found = effect([20, 40, 33], [0, 0, 0], paired=True)
    (probe,) = [line for line in lines if line.startswith("| linear probe")]
    assert f"| +31.0 | {found.low:+.1f} to {found.high:+.1f} | +20.0 | +40.0 | 3 of 3 |" in probe
    assert any(line.endswith("| -40.0 | -20.0 | 0 of 3 |") for line in lines)


def test_a_run_without_a_report_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"demo-7/report.json is missing: run make demo"):
        main([str(tmp_path / "demo-7")])
