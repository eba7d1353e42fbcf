"""Rank tables and pictures from runs of the test's making."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from analysis import rank, rank_tables


def write_run(folder, directions=("forward", "backward", "both"), inner=4, **changes):
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows, arrays = [], {}
    for block in range(2):
        for direction in directions:
            rows.append(
                {
                    "block": block, "direction": direction, "tokens": 12, "chunk": 5, "inner_size": inner,
                    "matrices": 6, "residual_max": 3e-16, "rank_min": 11 + block, "rank_mean": 12.0, "rank_max": 12,
                    "rank_bound": 12, "effective_rank_mean": 7.25, "effective_rank_std": 0.5, "diagonal_rank_min": 5,
                    "diagonal_rank_max": 5, "diagonal_rank_bound": 5, "diagonal_effective_rank_mean": 3.5,
                    "block_rank_min": 3, "block_rank_max": 4, "block_rank_bound": 4, "block_effective_rank_mean": 1.5,
                    "block_beyond_bound": 1e-17, "decay_block_rank_min": 1, "decay_block_rank_max": 1,
                    "decay_diagonal_rank_min": 5, "lower_bound_slack_min": -1, "lower_bound_slack_max": 0,
                    "diagonal_nonzero_min": 12, "ragged_tokens": 2, "ragged_rank_max": 2, "ragged_rank_bound": 2,
                    "bound_holds": True,
                }
            )  # fmt: skip
            arrays[f"matrix/block{block}/{direction}"] = np.tril(rng.normal(size=(2, 12, 12)))
            arrays[f"spectrum/block{block}/{direction}"] = np.linspace(1, 0, 12)
    table = {"module": "TokenMixingRanks", "backbone": "VisionMamba", "rows": rows} | changes
    (folder / "results.json").write_text(json.dumps(table))
    np.savez(folder / "results.npz", **arrays)
    return folder


def test_tables_and_pictures(tmp_path):
    vim = write_run(tmp_path / "vim")
    vit = write_run(tmp_path / "vit", ("attention",), None, backbone="VisionTransformer")
    linear = write_run(tmp_path / "linear", ("attention",), 8, backbone="LinearVisionTransformer")
    rank.main([vim, vit, linear], vim)
    with open(vim / "ranks.csv") as file:
        rows = list(csv.DictReader(file))
    assert [r["paper"] for r in rows[:3]] == ["rank(L) · 4, rank(L) ≫ 1"] * 3
    assert [r["paper"] for r in rows[6:]] == ["C = 5"] * 2 + ["D_QK = 8"] * 2
    assert {r["block_rank_bound"] for r in rows} == {"4"} and rows[0]["effective_rank"] == "7.25 ± 0.50"
    assert (rows[0]["rank"], rows[3]["rank"], rows[0]["block_rank"]) == ("11 to 12", "12", "3 to 4")
    markdown = (vim / "ranks.md").read_text()
    assert markdown.count("\n| ") == 12 and "| yes | 3.0e-16 |" in markdown
    said = (vim / "ranks-claims.md").read_text()
    assert "| block off the diagonal | algebra | <= min(C, rank(L) N) = 4 | 3 to 4 | yes | yes | 12 |" in said
    assert "| decay mask's block | paper | rank(L) >> 1 | 1 | – | NO | 12 |" in said
    with open(vim / "ranks-summary.csv") as file:
        first, *others = csv.DictReader(file)
    assert [row["direction"] for row in (first, *others)] == ["forward", "backward", "both", "attention", "attention"]
    assert (first["rank"], first["block_rank"], first["matrices"]) == ("11 to 12", "3 to 4", "12")
    assert (float(first["effective_rank"]), float(first["block_effective_rank"])) == (7.25, 1.5)
    page = (vim / "ranks.html").read_text()
    assert page.count("<img") == 6 and "exactly 1" in page and 'src="http' not in page
    for run in (vim, vit, linear):
        for name in ("matrices", "spectra"):
            assert Image.open(run / f"{name}.png").size[0] > 200
            assert (run / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert not [p.name for p in run.iterdir() if p.name.startswith(".")]


def change(run, index, **values):
    table = json.loads((run / "results.json").read_text())
    table["rows"][index] |= values
    (run / "results.json").write_text(json.dumps(table))


def test_a_broken_bound_is_told(tmp_path):
    run = write_run(tmp_path / "vim")
    change(run, 1, bound_holds=False)
    assert rank.main([run], run)[0].read_text().count("| NO |") == 1


def claims(run):
    """(direction, of, by) -> claim."""
    return {(row["direction"], row["of"], row["by"]): row for row in rank_tables.claims_of(rank.read(run))}


def test_claims_are_told_once_for_all_blocks(tmp_path):
    """What algebra says holds and what the paper says of the mask does not; a rank above its bound is told."""
    run = write_run(tmp_path / "vim")
    found = claims(run)
    block, mask = found["forward", "block off the diagonal", "algebra"], found["forward", "decay mask's block", "paper"]
    assert (block["says"], block["measured"], block["tight"]) == ("<= min(C, rank(L) N) = 4", "3 to 4", True)
    assert (block["holds"], block["matrices"]) == (True, 12) and not mask["holds"]
    assert found["forward", "M", "algebra, of numerical ranks"]["measured"] == "-1 to 0"
    change(run, 3, block_rank_max=5)
    assert not claims(run)["forward", "block off the diagonal", "algebra"]["holds"]
    assert claims(run)["backward", "block off the diagonal", "algebra"]["holds"]


def test_runs_of_an_earlier_version_are_refused(tmp_path):
    run = write_run(tmp_path / "vim")
    table = json.loads((run / "results.json").read_text())
    del table["rows"][0]["ragged_tokens"]
    (run / "results.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"results.json is of an earlier version, without ragged_tokens: run it again"):
        rank.read(run)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"results.json is missing: run dinomamba validate with -c task/ranks"):
        rank.read(tmp_path)
    with pytest.raises(ValueError, match="is a table of KNN, wanted one of TokenMixingRanks"):
        rank.read(write_run(tmp_path / "knn", module="KNN"))
