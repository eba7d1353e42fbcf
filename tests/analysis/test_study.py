"""The study's numbers are those of its runs, and what it says of claims follows from them."""

import csv
import json

import numpy as np
import pytest

from analysis import study
from analysis.study_values import read
from experiments import spec
from metrics.effects import effect
from tests.analysis.runs import head, map_row, write_run

(TARGET,) = spec.targets(["study"])
SEEDS = TARGET.options["seeds"]
SCORES = {"vit_demo": 0.8, "linear_vit_demo": 0.6, "vim_demo": 0.7, "mambar_demo": 0.72}
BRANCH = {"vim_demo", "mambar_demo"}
"""Whose published results read the branch."""
LESS = 0.05
"""By so much the other stream scores below."""


def write_model(where, model, score):
    published, other = ("branch", "residual") if model.removesuffix("_random") in BRANCH else ("residual", "branch")
    both = (("published", published, score), ("other", other, score - LESS))
    heads = [head(pooling="cls", last=s) | {"block": 3, "stream": t, "reading": r} for r, t, s in both]
    write_run(where, model, "places", [*heads, heads[0] | {"block": 0, "top1_last": 0.99}])
    knn = [{"k": k, "top1": s - (k > 20), "stream": t, "reading": r} for r, t, s in both for k in (20, 100)]
    write_run(where, model, "knn_both", knn)
    maps = [map_row("block0/similarity", 0.9)]
    maps += [map_row("block3/similarity", 1 - s) | {"stream": t, "reading": r} for r, t, s in both]
    maps += [map_row("block3/mixing", score), map_row("shuffled", 0.5), map_row("position", 0.61)]
    write_run(where, model, "auc", maps)
    ranks = [
        {"direction": d, "effective_rank_mean": r, "block_effective_rank_mean": r / 2, "block_rank_max": 16}
        for d, r in (("forward", 99.0), ("both", 10 * score), ("both", 20 * score))
    ]
    attention = [row | {"direction": "attention"} for row in ranks[1:]]
    write_run(where, model, "ranks", ranks if published == "branch" else attention)


@pytest.fixture
def runs(tmp_path):
    """Five seeds that differ a little; untrained models score half."""
    for seed in SEEDS:
        for number, (model, score) in enumerate(SCORES.items()):
            score += np.random.default_rng([seed, number]).normal(0, 0.01)
            write_model(tmp_path / f"seed{seed}", model, score)
            write_model(tmp_path / f"seed{seed}", f"{model}_random", score / 2)
    return tmp_path


def test_values_are_those_of_the_runs(runs):
    found = read(TARGET, runs)
    scores = [0.7 + np.random.default_rng([seed, 2]).normal(0, 0.01) for seed in SEEDS]
    of = found.of
    assert found.models == [*SCORES] and found.streams("vim_demo") == ["branch", "residual"]
    assert of("probe", "vim_demo", stream="branch") == pytest.approx([100 * s for s in scores])  # of the last block
    assert of("probe", "vim_demo", published=False) == pytest.approx([100 * (s - LESS) for s in scores])
    assert of("knn", "vim_demo", trained=False, published=True) == pytest.approx([50 * s for s in scores])
    assert of("auc", "vim_demo", stream="branch") == pytest.approx(scores)  # max(m, 1 - m) of the last block
    assert of("raw_auc", "vim_demo", stream="branch") == pytest.approx([1 - s for s in scores])
    assert of("effective_rank", "vim_demo") == pytest.approx([15 * s for s in scores])  # of both directions together
    assert of("position_auc", "vit_demo") == [0.61] * 5


def test_claims_effects_and_parts(runs):
    found = read(TARGET, runs)
    claims = list(study.claim_rows(found, TARGET))
    auc = [row for row in claims if row["metric"].startswith("Binary-AUC, CLS–patch")]

    def of(says):
        return {row["reading"]: row for row in auc if row["says"] == says}

    above = of("softmax attention above Mamba")
    assert [*above] == ["published", "residual", "branch"] and {row["verdict"] for row in above.values()} == {"holds"}
    sides = (found.of("auc", model, stream="residual") for model in ("vit_demo", "vim_demo"))
    wanted = effect(*sides, paired=False)
    assert above["residual"]["difference"] == f"{wanted.difference:+.3f}"
    assert above["residual"]["interval"] == f"{wanted.low:+.3f} to {wanted.high:+.3f}"
    assert of("registers help Mamba")["published"]["verdict"] in ("holds", "cannot be told")
    learned = list(study.learned_rows(found, TARGET))
    row = next(r for r in learned if r["metric"].startswith("k-NN") and r["model"] == "ViT")
    assert row["stream"] == "residual" and float(row["difference"]) == pytest.approx(40, abs=1)
    parts = [
        row
        for row in study.parted_rows(found, TARGET)
        if row["models"] == "ViT − Vim" and row["state"] == "pretrained" and row["metric"].startswith("linear")
    ]
    whole, mixer, reading = (float(row["difference"]) for row in parts)
    assert whole == pytest.approx(mixer + reading, abs=0.11) and reading == pytest.approx(-5, abs=0.11)


def test_ranks_go_with_scores(runs):
    """The runs' ranks are proportional to their scores."""
    rows = list(study.rank_rows(read(TARGET, runs), TARGET))
    residual = {row["over"]: row for row in rows if row["metric"].startswith("Bin") and row["reading"] == "published"}
    assert residual["models, seed by seed"]["n"] == 20 and residual["models, seed by seed"]["rho"] == "+1.00"
    assert residual["seeds, within models"]["rho"] == "+1.00" and len(rows) == 2 * 3 * 3 * 2


@pytest.mark.parametrize(
    ("a", "b", "says"), [([3, 4, 5], [0, 1, 2], "holds"), ([0, 1, 2], [3, 4, 5], "against"),
                         ([0, 4, 5], [1, 2, 3], "cannot be told"), ([9], [1], "cannot be told")],
)  # fmt: skip
def test_verdicts(a, b, says):
    assert study.verdict(effect(a, b, paired=False)) == says


def test_pages(runs):
    paths = study.draw(TARGET, runs)
    page = (runs / "study.html").read_text()
    for heading in ("What pretraining brought", "What the paper says", "The reading or the mixer"):
        assert heading in page
    assert "129,600" in page and "12,000 validation images" in page and "data:image/png" in page
    values = json.loads((runs / "study.json").read_text())["values"]
    with (runs / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    # four metrics in two streams and six in none, for each seed of eight models
    assert len(rows) == len(values) == (4 * 2 + 6) * 8 * 5
    assert all(path.is_file() for path in paths) and (runs / "study.pdf").read_bytes().startswith(b"%PDF")


def test_what_is_missing_is_named(runs):
    (runs / "seed3/vim_demo-knn_both/results.json").unlink()
    with pytest.raises(ValueError, match=r"seed3/vim_demo-knn_both/results.json is missing: run make study"):
        study.draw(TARGET, runs)
