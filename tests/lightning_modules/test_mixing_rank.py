"""Rank evaluation over several processes, and its errors."""

import pytest
import torch

from backbones import LinearVisionTransformer, MambaReg, TimmModel, VimMamba1, VisionMamba, VisionTransformer
from lightning_modules import TokenMixingRanks
from metrics import rank_claims
from tests.processes import run_ranks


def module(**kwargs):
    torch.manual_seed(0)
    backbone = VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=2, headdim=8)
    made = TokenMixingRanks(backbone, chunk=6, **kwargs)
    made.setup("validate")
    made.log = lambda *args, **kwargs: None
    return made


def shares(rank, images, sizes):
    """Each rank's own part of the images; a size of 0 is an empty rank."""
    made = module()
    made.validation_step({"image": images.split(sizes)[rank]}, 0)
    made.on_validation_epoch_end()
    return made.rows(), {k: v for k, v in made.arrays().items() if k.startswith("spectrum")}


@pytest.mark.parametrize("sizes", [[3, 2], [5, 0]])
def test_ranks_over_processes(sizes):
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows, spectra = shares(0, images, [5])
    for theirs, their_spectra in run_ranks(shares, 2, images, sizes):
        for ours, row in zip(rows, theirs, strict=True):
            assert {k: row[k] for k in row if not isinstance(row[k], float)} == {
                k: v for k, v in ours.items() if not isinstance(v, float)
            }
            for key, value in row.items():
                if isinstance(value, float):
                    assert value == pytest.approx(ours[key], abs=1e-9)
        for name, spectrum in spectra.items():
            torch.testing.assert_close(torch.tensor(their_spectra[name]), torch.tensor(spectrum), atol=1e-12, rtol=0)


def test_errors():
    with pytest.raises(ValueError, match="backbone=TimmModel does not take its mixers apart"):
        TokenMixingRanks(TimmModel("test_vit"))
    with pytest.raises(ValueError, match="max_heads=0 must be at least 1"):
        module(max_heads=0)
    with pytest.raises(ValueError, match="blocks is empty"):
        module(blocks=[])
    with pytest.raises(ValueError, match="block=7"):
        module(blocks=[7])
    with pytest.raises(ValueError, match=r"mask='lower'; allowed: none, causal"):
        module(mask="lower")
    with pytest.raises(ValueError, match=r"init_args.tolerance=2 must be at least 0 and below 1, or null"):
        module(tolerance=2)
    images = {"image": torch.randn(1, 3, 16, 16)}
    large = module()
    large.chunk = 19
    with pytest.raises(
        ValueError, match=r"init_args.chunk=19: block 0 mixes 18 tokens; allowed are 1\.\.18, or give l"
    ):
        large.validation_step(images, 0)


def test_heads_are_spread_over_all():
    made = module(max_heads=2)
    made.validation_step({"image": torch.randn(3, 3, 16, 16)}, 0)
    made.on_validation_epoch_end()
    assert {row["matrices"] for row in made.rows()} == {6}
    assert {v.shape for k, v in made.arrays().items() if k.startswith("matrix")} == {(2, 18, 18)}


SCAN = {"d_state": 3, "headdim": 8}
FAMILIES = {
    "vim": (VisionMamba, SCAN),
    "mambar": (MambaReg, {**SCAN, "num_registers": 2}),
    "vit": (VisionTransformer, {"num_heads": 2}),
    "linear_vit": (LinearVisionTransformer, {"num_heads": 2}),
    "vim_mamba1": (VimMamba1, {"d_state": 3}),
}


def measured(name, side=32, **kwargs):
    family, options = FAMILIES[name]
    torch.manual_seed(0)
    made = TokenMixingRanks(family(img_size=side, patch_size=4, embed_dim=16, depth=2, **options), **kwargs)
    made.setup("validate")
    made.log = lambda *args, **kwargs: None
    made.validation_step({"image": torch.randn(2, 3, side, side)}, 0)
    made.on_validation_epoch_end()
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_claims_on_real_mixers(name):
    """65 or 66 tokens in chunks of 16 and one or two left over: what algebra says holds, and mixers differ as it says."""
    for row in measured(name, chunk=16, mask="causal", max_heads=3).rows():
        claims = rank_claims(row)
        assert row["bound_holds"] and all(claim.holds for claim in claims if claim.by == "algebra")
        assert row["ragged_tokens"] == row["tokens"] - 64 and row["ragged_rank_max"] <= row["ragged_rank_bound"]
        attention = name in ("vit", "linear_vit")
        assert row["inner_size"] == {"vit": None, "linear_vit": 8}.get(name, 3)
        bound = 16 if row["inner_size"] is None else row["inner_size"]
        assert row["block_rank_bound"] == bound and 1 <= row["block_rank_min"] <= row["block_rank_max"] <= bound
        if attention:
            assert row["block_rank_min"] == bound  # random ones reach it
        triangular = row["direction"] not in ("attention", "both")
        assert (row["lower_bound_slack_min"] is not None) == triangular
        if triangular:
            assert row["diagonal_nonzero_min"] == row["tokens"] and row["diagonal_rank_bound"] == 16
        one_decay = name in ("vim", "mambar") and row["direction"] != "both"
        decay = [row[f"decay_{k}"] for k in ("block_rank_min", "block_rank_max", "diagonal_rank_min")]
        assert decay == ([1, 1, 16] if one_decay else [None] * 3)
        if row["block_beyond_bound"] is not None:
            assert row["block_beyond_bound"] < 1e-14


def test_the_mask_is_measured_beside_the_whole():
    directions = [row["direction"] for row in measured("linear_vit", chunk=16, mask="causal").rows()]
    assert directions == ["attention", "causal"] * 2
    whole, masked, *_ = measured("linear_vit", chunk=16, mask="causal").rows()
    assert (whole["rank_max"], whole["rank_bound"], whole["diagonal_rank_max"]) == (8, 8, 8)
    assert masked["rank_bound"] == 65 and masked["rank_min"] > 32 and masked["diagonal_rank_max"] == 16
    for key in ("block_rank_min", "block_rank_max", "ragged_rank_max"):
        assert whole[key] == masked[key]  # below the diagonal the mask is one
    assert [row["direction"] for row in measured("vim", chunk=16, mask="causal", blocks=[0]).rows()] == [
        "forward", "backward", "both"
    ]  # fmt: skip


def test_one_chunk_has_nothing_beside_it():
    """At 224 px the paper's C = 256 is more than the sequence: no block off the diagonal, so none is reported."""
    for row in measured("vim", side=16, chunk=18).rows():
        assert row["block_rank_max"] is row["block_effective_rank_mean"] is row["ragged_rank_max"] is None
        assert row["diagonal_rank_bound"] == 18 and row["bound_holds"]


def test_heads_of_a_decomposition_are_those_of_the_whole():
    for name in FAMILIES:
        backbone = measured(name, side=16, chunk=6).backbone
        images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        for some, every in zip(backbone.decompose(images, max_heads=2)[0], backbone.decompose(images)[0], strict=True):
            heads = every.matrix.shape[1]
            ends = [0, heads - 1]
            for ours, theirs in zip(some[1:6], every[1:6], strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs[:, ends], atol=1e-12, rtol=0)
