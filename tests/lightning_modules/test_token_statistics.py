"""Norms, mixing distances and lazy heads of a backbone, against loops; alike for any batches and processes."""

import math

import numpy as np
import pytest
import torch

from backbones import LinearVisionTransformer, MambaReg, TimmModel, VimMamba1, VisionMamba, VisionTransformer
from lightning_modules import TokenStatistics
from tests.lightning_modules.test_over_processes import attach
from tests.processes import run_ranks

SIZE = {"img_size": (20, 12), "patch_size": 4, "embed_dim": 16, "depth": 2}  # 5 x 3 patches
FAMILIES = {
    "vit": (VisionTransformer, {"num_heads": 2, "num_registers": 2}),
    "linear_vit": (LinearVisionTransformer, {"num_heads": 2, "key_axis": "channels"}),
    "vim": (VisionMamba, {"d_state": 5, "headdim": 8}),
    "mambar": (MambaReg, {"d_state": 5, "headdim": 8, "num_registers": 2}),
}


def backbone(family="vim"):
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    return kind(**SIZE, **options)


def samples(count, double=True):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 20, 12, generator=generator, dtype=torch.float64 if double else torch.float32)
    images[0, :, :4, :4] *= 40  # a long patch, on background
    masks = torch.zeros(count, 20, 12, dtype=torch.int32)
    masks[:, 6:13, 2:9] = 3
    masks[:, 16:] = 1000
    return images, masks, [f"k{(7 * i) % count:03d}" for i in range(count)]


def measure(model, count=3, sizes=None, with_masks=True, double=True, **options):
    module = attach(TokenStatistics(model, **options)).eval()
    images, masks, keys = samples(count, double)
    start = 0
    for size in sizes or [count]:
        part = slice(start, start + size)
        start += size
        batch = {"image": images[part], "key": keys[part]} | ({"mask": masks[part]} if with_masks else {})
        module.validation_step(batch, 0)
    module.on_validation_epoch_end()
    return module.rows()


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_before_the_final_norm(family):
    model = backbone(family).double()
    rows = [row for row in measure(model, stream="both", outlier_factor=1.3) if row["head"] is None]
    streams = [model.published_stream, "branch" if model.published_stream == "residual" else "residual"]
    assert [(row["block"], row["stream"], row["reading"]) for row in rows] == [
        (block, stream, reading) for block in (0, 1) for stream, reading in zip(streams, ("published", "other"), strict=True)
    ]  # fmt: skip
    images, masks, _ = samples(3)
    ids = masks[:, 2::4, 2::4].flatten(1).numpy()  # the pixel at the middle of each patch
    x, layout = model._embed(images)
    for i, trace in enumerate(model._traces(x)):
        for row in rows:
            if row["block"] != i:
                continue
            tokens = getattr(trace, row["stream"]).detach()
            norms = tokens[:, layout.patches].norm(dim=2).numpy()
            outliers = norms > 1.3 * np.median(norms, 1, keepdims=True)
            wanted = {
                "patch_norm_median": np.median(norms, 1).mean(),
                "patch_norm_q99": np.quantile(norms, 0.99, axis=1).mean(),
                "patch_norm_max": norms.max(),
                "outlier_share": outliers.mean(),
                "images_with_outliers": outliers.any(1).mean(),
                "cls_norm": tokens[:, layout.readout].mean(1).norm(dim=1).mean().item(),
                "background_share": (ids == 0).sum() / (ids != 1000).sum(),
            }
            for name, value in wanted.items():
                assert row[name] == pytest.approx(value, rel=1e-10), name
            told = (outliers & (ids != 1000)).sum()
            assert row["outliers_on_background"] == (
                pytest.approx((outliers & (ids == 0)).sum() / told) if told else None
            )
            if layout.registers is None:
                assert row["register_norm"] is None
            else:
                registers = tokens[:, layout.registers].norm(dim=2).mean().item()
                assert row["register_norm"] == pytest.approx(registers, rel=1e-10)
    assert any(row["outliers_on_background"] for row in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixing_by_loops(family):
    model = backbone(family).double()
    rows = {(row["block"], row["head"]): row for row in measure(model) if row["head"] is not None}
    images, _, _ = samples(3)
    layout = model._embed(images)[1]
    patches, readout = layout.patches.tolist(), layout.readout.tolist()
    for block in range(2):
        M = model.token_mixing(images, block).detach().numpy()
        for head in range(M.shape[1]):
            found = {
                "distance": [],
                "self_share": [],
                "token_share": [],
                "cls_row_entropy": [],
                "cls_row_token_share": [],
            }
            for matrix in M[:, head]:
                far, own, others = [], [], []
                for a, i in enumerate(patches):
                    weight = np.abs(matrix[i])
                    seen = weight[patches]
                    far.append(sum(w * math.dist(divmod(a, 3), divmod(b, 3)) for b, w in enumerate(seen)) / seen.sum())
                    own.append(weight[i] / weight.sum())
                    others.append(1 - seen.sum() / weight.sum())
                row = np.abs(matrix[readout].mean(0))
                p = row[patches] / row[patches].sum()
                found["distance"].append(np.mean(far))
                found["self_share"].append(np.mean(own))
                found["token_share"].append(np.mean(others))
                found["cls_row_entropy"].append(-(p * np.log(p)).sum() / math.log(15))
                found["cls_row_token_share"].append(1 - row[patches].sum() / row.sum())
            ours = rows[block, head]
            for name, values in found.items():
                assert ours[name] == pytest.approx(np.mean(values), abs=1e-10), name
            assert ours["distance_of_diagonal"] == pytest.approx(ours["distance"] / math.hypot(5, 3))
            assert ours["lazy_uniform"] is (ours["cls_row_entropy"] >= 0.95)
            assert ours["lazy_elsewhere"] is (ours["cls_row_token_share"] >= 0.9)
    assert len(rows) == 2 * M.shape[1]


def test_lazy_heads_by_construction():
    """Queries of zero mix all alike; a class token that every query looks at takes all the weight."""
    model = backbone("vit").double()
    torch.nn.init.zeros_(model.blocks[1].attn.qkv.weight)
    torch.nn.init.zeros_(model.blocks[1].attn.qkv.bias)
    rows = [row for row in measure(model) if row["block"] == 1 and row["head"] is not None]
    for row in rows:
        assert row["lazy_uniform"] and not row["lazy_elsewhere"]
        assert row["distance"] == pytest.approx(row["uniform_distance"]) and row["self_share"] == pytest.approx(1 / 18)
        assert [row["token_share"], row["cls_row_token_share"]] == pytest.approx([3 / 18] * 2)
    (lax, *_) = (row for row in measure(model, lazy_share=0.1) if row["block"] == 1 and row["head"] is not None)
    assert lax["lazy_elsewhere"]


def close(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=1e-5, abs=1e-7) if isinstance(value, float) else value), key


def test_batches_do_not_matter():
    whole = measure(backbone("mambar"), 7, double=False, stream="both")
    close(whole, measure(backbone("mambar"), 7, [2, 4, 1], double=False, stream="both"))
    without = measure(backbone("mambar"), 7, with_masks=False, double=False)
    assert {row["background_share"] for row in without} == {None} == {row["outliers_on_background"] for row in without}


def on_rank(rank, sizes):
    module = attach(TokenStatistics(backbone())).eval()
    images, masks, keys = samples(sum(sizes), double=False)
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    module.validation_step({"image": images[part], "mask": masks[part], "key": keys[part]}, 0)
    module.on_validation_epoch_end()
    return module.rows()


@pytest.mark.parametrize("sizes", [[2, 3], [5, 0]])
def test_processes_do_not_matter(sizes):
    wanted = on_rank(0, [5])
    for found in run_ranks(on_rank, 2, sizes):
        close(wanted, found)


def test_other_backbones():
    """Channels of Mamba-1 are no heads; timm's attention is read, and what it does not tell is left out."""
    options = {"double": False, "stream": "both"}
    assert all(row["head"] is None for row in measure(VimMamba1(**SIZE, d_state=4), **options))
    torch.manual_seed(0)
    model = TimmModel("vit_tiny_patch16_224", img_size=32)
    module = attach(TokenStatistics(model, [-1], stream="both")).eval()
    images = torch.randn(2, 3, 32, 32)
    module.validation_step({"image": images, "key": ["a", "b"]}, 0)
    module.on_validation_epoch_end()
    published, other, *heads = module.rows()
    raw = model.model.forward_intermediates(images, indices=[11], norm=False, intermediates_only=True)[0]
    norms = raw.detach().flatten(2).norm(dim=1).numpy()
    assert published["patch_norm_median"] == pytest.approx(np.median(norms, 1).mean(), rel=1e-5)
    assert other["reading"] == "other" and len(heads) == 3
    M = model.token_mixing(images).detach()
    assert heads[1]["cls_row_token_share"] == pytest.approx(M[:, 1, 0, 0].mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"lazy_entropy": 1.5}, r"model\.init_args\.lazy_entropy=1\.5 must be between 0 and 1"),
        ({"outlier_factor": 0.0}, r"model\.init_args\.outlier_factor=0\.0 must be above 0"),
        ({"blocks": []}, r"model\.init_args\.blocks is empty"),
        ({"stream": "both ways"}, r"model\.init_args\.stream='both ways'; allowed"),
    ],
)
def test_wrong_options(option, words):
    with pytest.raises(ValueError, match=words):
        TokenStatistics(backbone(), **option)
