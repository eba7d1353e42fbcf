"""Retrieval of patches against brute force."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_modules import PatchKNN
from metrics import nearest_votes
from tests.lightning_modules.test_dense import FAMILIES


def test_votes_are_those_of_all_pairs():
    g = torch.Generator().manual_seed(0)
    queries, bank = torch.randn(7, 5, generator=g), torch.randn(23, 5, generator=g)
    shares = torch.rand(23, 3, generator=g)
    cosines = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    for k in (1, 4, 99):
        wanted = []
        for row in cosines:
            best = row.argsort(descending=True)[:k]
            weights = (row[best] / 0.1).softmax(0)
            wanted.append((weights[:, None] * shares[best]).sum(0))
        found = nearest_votes(queries, bank, shares, k, 0.1, chunk=3, block=10)
        torch.testing.assert_close(found, torch.stack(wanted))


def model(**options):
    torch.manual_seed(0)
    return PatchKNN(FAMILIES["vit"](), num_classes=3, **options)


def test_shares_are_counted_pixel_by_pixel():
    module = model()
    rng = np.random.default_rng(0)
    target = torch.from_numpy(rng.choice([0, 1, 2, 255], (19, 21)))
    found = module.shares(target, (19, 21), (3, 3))
    for row in range(3):
        for column in range(3):
            part = target[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            counts = np.array([(part == c).sum() for c in range(3)], float)
            np.testing.assert_allclose(found[3 * row + column], counts / max(1, counts.sum()))


def test_images_of_the_bank_are_found_again():
    """With one neighbour the bank's own images come out as their patches' most frequent classes."""
    module = model(k=1, patches_per_image=99, temperature=0.01)
    g = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 32, 40, generator=g)
    cells = torch.randint(0, 3, (3, 4, 5), generator=g)
    targets = cells.repeat_interleave(8, 1).repeat_interleave(8, 2)
    batch = {"key": ["a", "b", "c"], "image": list(images), "target": list(targets)}
    shown = []
    module.score = lambda key, image, predicted, target: shown.append((predicted, target))
    with torch.no_grad():
        module.validation_step(batch, 0, 0)
        module.validation_step(batch, 0, 1)
    for predicted, target in shown:
        centres = predicted[4::8, 4::8]
        assert (centres == target[4::8, 4::8]).float().mean() > 0.95


def test_wrong_options_and_an_empty_bank_are_named():
    with pytest.raises(ValueError, match="k=0; allowed: 1 and more"):
        model(k=0)
    with pytest.raises(ValueError, match="temperature=0; allowed: above 0"):
        model(temperature=0)
    with pytest.raises(ValueError, match="train_shards, has no labelled patch"):
        model().validation_step({"key": [], "image": [], "target": []}, 0, 1)
