"""Rank evaluation over several processes, and its errors."""

import pytest
import torch

from backbones import TimmModel, VisionMamba
from lightning_modules import TokenMixingRanks
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


def test_heads_are_spread_over_all():
    made = module(max_heads=2)
    made.validation_step({"image": torch.randn(3, 3, 16, 16)}, 0)
    made.on_validation_epoch_end()
    assert {row["matrices"] for row in made.rows()} == {6}
    assert {v.shape for k, v in made.arrays().items() if k.startswith("matrix")} == {(2, 18, 18)}
