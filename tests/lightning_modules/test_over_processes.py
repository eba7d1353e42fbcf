"""What is summed or gathered over processes is what one process finds, an empty one included."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score

from backbones import VisionMamba
from lightning_modules import KNN, BinaryAUCEvaluation, HeadSpec, RobustnessEvaluation
from lightning_modules.maps import MapName
from metrics import masks_to_grid
from tests.processes import run_ranks


def backbone():
    torch.manual_seed(0)
    return VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)


def attach(module, **data):
    world = dist.get_world_size() if dist.is_initialized() else 1
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(**data), world_size=world, sanity_checking=False)
    module.log = module.log_dict = lambda *args, **kwargs: None
    return module


def samples(count):
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(count, 16, 16, dtype=torch.int32)
    masks[:, 2:9, 5:12] = 3
    images = torch.randn(count, 3, 16, 16, generator=generator)
    return images, masks, torch.randint(4, (count, 2), generator=generator) - 1, [f"k{i}" for i in range(count)]


def share(rank, sizes):
    """This rank's part of the samples, in batches of two; an empty rank gets one empty batch."""
    images, masks, answers, keys = samples(sum(sizes))
    start = sum(sizes[:rank])
    batches = []
    for at in range(start, start + sizes[rank], 2) or [start]:
        part = slice(at, min(at + 2, start + sizes[rank]))
        batches.append({"image": images[part], "mask": masks[part], "answers": answers[part], "key": keys[part]})
    return batches


def pictures(rank, sizes, count):
    module = attach(BinaryAUCEvaluation(backbone(), pictures=count), mean=(0.5,) * 3, std=(0.2,) * 3).eval()
    for number, batch in enumerate(share(rank, sizes)):
        module.validation_step(batch, number)
    module.on_validation_epoch_end()
    return module.arrays(), module.rows()


@pytest.mark.parametrize(("sizes", "count"), [([2, 5], 6), ([7, 0], 4)])
def test_pictures_are_the_first_over_all_ranks(sizes, count):
    wanted, rows = pictures(0, [7], count)
    assert wanted["keys"].tolist() == [f"k{i}" for i in range(count)]
    for found, their_rows in run_ranks(pictures, 2, sizes, count):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if value.dtype.kind in "fi":
                np.testing.assert_allclose(found[name], value, atol=1e-5)
            else:
                assert np.array_equal(found[name], value), name
        for ours, theirs in zip(rows, their_rows, strict=True):
            assert ours["auc"] == pytest.approx(theirs["auc"], abs=1e-12) and ours["images"] == theirs["images"]


WAYS = ["grid", "area", "mask", "pooled"]


def controls(rank, sizes):
    """Rows of maps that do not hang on how images are batched: the same numbers of each image."""
    module = attach(BinaryAUCEvaluation(backbone(), compare=WAYS)).eval()
    module.named_maps = lambda images: {MapName(1, "similarity"): images[:, 0, ::4, ::4]}
    for number, batch in enumerate(share(rank, sizes)):
        module.validation_step(batch, number)
    module.on_validation_epoch_end()
    return module.rows()


@pytest.mark.parametrize("sizes", [[2, 5], [7, 0]])
def test_every_way_is_bitwise_that_of_one_process(sizes):
    wanted = controls(0, [7])
    assert len(wanted) == 12 and run_ranks(controls, 2, sizes) == [wanted, wanted]
    images, masks, _, _ = samples(7)
    cells, ids = images[:, 0, ::4, ::4].flatten().numpy(), masks_to_grid(masks, (4, 4)).flatten().numpy()
    assert wanted[9]["compare"] == "pooled" and wanted[9]["kind"] == "similarity"
    assert wanted[9]["auc"] == pytest.approx(roc_auc_score(ids != 0, cells), abs=1e-12)


def neighbours(rank, sizes, bank, stream):
    module = attach(KNN(backbone(), 4, [3, 1], stream=stream)).eval()
    for loader, parts in enumerate((bank, sizes)):
        images, _, answers, _ = samples(sum(parts))
        start = sum(parts[:rank])
        batch = {"image": images[start : start + parts[rank]], "label": answers[start : start + parts[rank], 0] + 1}
        module.validation_step(batch, 0, loader)
    module.on_validation_epoch_end()
    return module.rows()


@pytest.mark.parametrize(("sizes", "bank"), [([4, 3], [9, 4]), ([7, 0], [13, 0])])
def test_neighbours_in_both_streams(sizes, bank):
    wanted = neighbours(0, [7], [13], "both")
    assert [(row["k"], row["reading"]) for row in wanted] == [
        (3, "published"), (1, "published"), (3, "other"), (1, "other"),
    ]  # fmt: skip
    assert run_ranks(neighbours, 2, sizes, bank, "both") == [wanted, wanted]


def robustness(rank, sizes):
    module = attach(RobustnessEvaluation(backbone(), "probe"), classes={"all": None, "two": [0, 2]})
    torch.manual_seed(1)
    module.spec = HeadSpec(2)
    module.head = module.spec.build([16] * module.backbone.depth, 3)
    module.on_validation_epoch_start()
    for loader in range(2):
        for number, batch in enumerate(share(rank, sizes)):
            module.validation_step(batch, number, loader)
    module.on_validation_epoch_end()
    return module.rows()


@pytest.mark.parametrize("sizes", [[7, 0]])
def test_robustness_counts_every_image_once(sizes):
    wanted = robustness(0, [7])
    assert wanted[0]["images"] == int((samples(7)[2] >= 0).any(1).sum()) < 7  # the naive denominator
    assert run_ranks(robustness, 2, sizes) == [wanted, wanted]
