"""What is scored beside the maps asked for: both readings, controls, intervals, and every image by its key."""

import numpy as np
import pytest
import torch

from backbones import TimmModel, VisionMamba
from lightning_modules import BinaryAUCEvaluation
from lightning_modules.maps import similarity_map
from metrics import (
    POOLED_DRAWS,
    binary_auc,
    bootstrap_counts,
    masks_to_grid,
    paired_difference,
    position_map,
)
from tests.lightning_modules.test_over_processes import attach, samples


def vim():
    torch.manual_seed(0)
    return VisionMamba(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=4, headdim=8)


def score(module, sizes=(7,), order=None):
    images, masks, _, keys = samples(sum(sizes))
    order = list(range(len(keys))) if order is None else order
    start = 0
    for number, size in enumerate(sizes):
        part = order[start : start + size]
        batch = {"image": images[part], "mask": masks[part], "key": [keys[i] for i in part]}
        attach(module, mean=(0.5,) * 3, std=(0.2,) * 3).eval().validation_step(batch, number)
        start += size
    module.on_validation_epoch_end()
    return {row["map"]: row for row in module.rows()}, module.arrays()


def pooled_auc(scores, masks):
    """The cells (n, h, w) of all images as those of one."""
    ids = masks_to_grid(masks, scores.shape[-2:])
    return binary_auc(scores.flatten(0, 1)[None, None], ids.flatten(0, 1)[None]).item()


def test_both_readings_are_those_of_each_alone():
    kinds = ["similarity", "mixing"]
    both, _ = score(BinaryAUCEvaluation(vim(), kinds, "all", stream="both"))
    for stream, suffix, reading in (("branch", "", "published"), ("residual", "/residual", "other")):
        alone, _ = score(BinaryAUCEvaluation(vim(), kinds, "all", stream=stream))
        for block in (0, 1):
            found, wanted = both[f"block{block}/similarity{suffix}"], alone[f"block{block}/similarity"]
            assert (
                found["reading"] == reading and found["auc"] == wanted["auc"] and found["auc_low"] == wanted["auc_low"]
            )
    assert both["block1/similarity"]["auc"] != both["block1/similarity/residual"]["auc"]
    assert "block1/mixing/residual" not in both  # no stream is read for it
    assert both["block1/similarity/residual"]["stream"] == "residual"


def test_where_there_is_one_stream_it_is_scored_alone(caplog):
    rows, _ = score(BinaryAUCEvaluation(TimmModel("test_efficientnet"), ["similarity"], stream="both"))
    assert {row["reading"] for row in rows.values()} == {"published"}
    assert caplog.text.count("the published one alone is scored") == 1


def test_controls_intervals_and_images():
    _, masks, _, keys = samples(7)
    rows, arrays = score(BinaryAUCEvaluation(vim(), ["similarity"], "all"))
    assert [row["kind"] for row in rows.values()] == ["similarity", "similarity", "shuffled", "position"]
    centre = binary_auc(position_map((4, 4)).expand(7, 1, 4, 4).contiguous(), masks)
    assert rows["position"]["auc"] == pytest.approx(centre.mean().item(), abs=1e-9)
    assert arrays["image_keys"].tolist() == sorted(keys)
    for name, column in zip(arrays["image_auc_names"], arrays["image_auc"].T, strict=True):
        row = rows[str(name)]
        assert row["auc"] == pytest.approx(column.mean(), abs=1e-6)
        if np.ptp(column):
            assert row["auc_low"] < row["auc"] < row["auc_high"]


WAYS = ["grid", "area", "mask", "pooled"]


def ways_of(rows, name):
    return {row["compare"]: row for row in rows if row["map"] == name}


def test_the_same_maps_scored_each_way():
    """Each way's scores are those of the maps at hand; the first way's rows are those that it has alone."""
    images, masks, _, keys = samples(9)
    masks[3] = 0  # of one class
    masks[4, 2:9, 5:12] = 0
    masks[4, 0, 0] = 3  # a pixel that no cell sees
    masks[5] = 1000  # nothing takes part
    batch = {"image": images, "mask": masks, "key": keys}
    found = {}
    for ways in (WAYS, ["grid"]):
        module = attach(BinaryAUCEvaluation(vim(), ["similarity"], stream="both", compare=ways)).eval()
        module.validation_step(batch, 0)
        module.on_validation_epoch_end()
        found[len(ways)] = module.rows()
    rows, alone = found[4], found[1]
    named = module.named_maps(images)
    assert len(rows) == 4 * len(alone) == 16 and all(row["compare"] == "grid" for row in rows[:4])
    for row, same in zip(rows, alone, strict=False):
        assert {k: row[k] for k in same} == same and not [k for k in same if "difference" in k]
        assert all(row[k] is None for k in row if "difference" in k)
    for name, scores in named.items():
        by_way, auc = ways_of(rows, str(name)), {}
        for way in WAYS[:3]:
            auc[way] = binary_auc(scores[:, None], masks, compare=way)[:, 0].numpy()
            row, scored = by_way[way], ~np.isnan(auc[way])
            assert (row["images"], row["skipped"]) == (scored.sum(), 9 - scored.sum())
            assert row["images"] == (7 if way == "mask" else 6)
            assert row["auc"] == pytest.approx(auc[way][scored].mean(), abs=1e-9)
            if way != "grid":
                both = scored & ~np.isnan(auc["grid"])
                wanted = paired_difference(auc[way][both], auc["grid"][both])
                assert [row[f"difference{k}"] for k in ("", "_low", "_high", "_p")] == pytest.approx(wanted, abs=1e-12)
                assert row["difference_images"] == 6
        row = by_way["pooled"]
        assert row["auc"] == pooled_auc(scores, masks) and row["auc_normalized"] is None
        assert (row["images"], row["skipped"], row["difference_images"]) == (8, 1, 6)
        assert row["auc_low"] < row["auc"] < row["auc_high"]
        both = ~np.isnan(auc["grid"])
        pooled = pooled_auc(scores[both], masks[both])
        assert row["difference"] == pytest.approx(pooled - auc["grid"][both].mean(), abs=1e-12)


def test_the_difference_of_the_pooled_auc_by_brute_force():
    images, masks, _, keys = samples(8)
    masks[3] = 0  # has cells, and no AUC of its own
    module = attach(BinaryAUCEvaluation(vim(), ["similarity"], compare=["grid", "pooled"])).eval()
    module.validation_step({"image": images, "mask": masks, "key": keys}, 0)
    module.on_validation_epoch_end()
    row = ways_of(module.rows(), "block1/similarity")["pooled"]
    (scores,) = module.named_maps(images).values()
    auc, draws = binary_auc(scores[:, None], masks)[:, 0], []
    for counts in bootstrap_counts(7, POOLED_DRAWS):
        for count in counts:
            again = np.repeat([0, 1, 2, 4, 5, 6, 7], count)
            draws.append(pooled_auc(scores[again], masks[again]) - auc[again].mean().item())
    np.testing.assert_allclose(
        (row["difference_low"], row["difference_high"]), np.quantile(draws, [0.025, 0.975]), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("grow", [1, 3])
def test_nothing_is_scored(grow):
    """Images of one class in every mask, and none that take part: rows without numbers, and no error."""
    images, masks, _, keys = samples(3)
    masks[:] = 1000
    masks[: grow - 1] = 0
    module = attach(BinaryAUCEvaluation(vim(), ["similarity"], compare=WAYS)).eval()
    module.validation_step({"image": images, "mask": masks, "key": keys}, 0)
    module.on_validation_epoch_end()
    for row in module.rows():
        assert np.isnan(row["auc"]) and np.isnan(row["auc_low"])
        assert row["images"] == (grow - 1 if row["compare"] == "pooled" else 0)


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (["grid", "pixel"], r"compare=\['grid', 'pixel'\]; allowed: some of grid, area, mask, pooled"),
        (["grid", "grid"], "each once"),
        ([], "allowed: some of"),
        (["pooled", "grid"], "pooled has no score of each image; name another first"),
    ],
)
def test_ways_that_are_not_there(ways, words):
    with pytest.raises(ValueError, match=words):
        BinaryAUCEvaluation(vim(), compare=ways)


@pytest.mark.parametrize("sizes", [(1,) * 7, (3, 4)])
def test_neither_batches_nor_order_change_a_bit(sizes):
    wanted, arrays = score(BinaryAUCEvaluation(vim(), ["similarity"]))
    rows, found = score(BinaryAUCEvaluation(vim(), ["similarity"]), sizes, [4, 2, 6, 0, 1, 5, 3])
    for name in ("shuffled", "position"):
        assert rows[name] == wanted[name]
    assert all(np.array_equal(found[k], arrays[k]) for k in ("image_keys", "image_auc_names"))
    np.testing.assert_allclose(found["image_auc"], arrays["image_auc"], atol=1e-6)


def test_which_token_is_read():
    """Each named token's map is the cosine with its own feature, which its place in the sequence tells."""
    images, *_ = samples(7)
    backbone = vim().eval()
    module = BinaryAUCEvaluation(backbone, ["similarity", "token_similarity"], stream="both")
    maps = module.named_maps(images)
    parts = [(name.part, name.index) for name in maps if name.stream is None]
    patches = [1, 4, 8, 11, 14]  # of 16, spread evenly
    assert parts == [(None, None), ("first", None), *(("patch", n) for n in patches)]
    for stream, suffix in (("branch", None), ("residual", "residual")):
        (tokens,), layout = backbone.forward_sequences(images, 1, stream)
        at = {(None, None): 8, ("first", None): 0} | {("patch", n): 1 + n + (n >= 7) for n in patches}
        for (part, index), place in at.items():
            name = next(k for k in maps if (k.part, k.index, k.stream) == (part, index, suffix))
            wanted = similarity_map(tokens[:, place : place + 1], layout.split(tokens).patches)[:, 0]
            torch.testing.assert_close(maps[name], wanted, rtol=0, atol=1e-6)
            if part == "patch":
                torch.testing.assert_close(maps[name].flatten(1)[:, index], torch.ones(7), rtol=0, atol=1e-5)
    first, middle = (maps[k] for k in maps if k.stream is None and k.part in ("first", None))
    assert not torch.allclose(first, middle)


def test_rows_say_what_is_read():
    kinds = ["token_similarity", "mixing"]
    rows, _ = score(BinaryAUCEvaluation(vim(), kinds, stream="both", tokens=["first", "patch3"]))
    read = {name: (row["stream"], row["reading"]) for name, row in rows.items() if row["kind"] == "similarity"}
    assert read == {
        "block1/first/similarity": ("branch", "published"),
        "block1/patch3/similarity": ("branch", "published"),
        "block1/first/similarity/residual": ("residual", "other"),
        "block1/patch3/similarity/residual": ("residual", "other"),
    }
    rows, _ = score(BinaryAUCEvaluation(vim(), ["similarity"], stream="residual"))
    assert (rows["block1/similarity"]["stream"], rows["block1/similarity"]["reading"]) == ("residual", "other")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["middle"], "tokens=middle; allowed: cls, first, registerN, patchN"),
        ([], "tokens is empty"),
        (["patch16"], r"tokens=patch16: this backbone has none; it has cls, first, patch0\.\.15"),
        (["register0"], r"tokens=register0: this backbone has none; it has cls, first, patch0"),
    ],
)
def test_tokens_that_are_not_there(tokens, words):
    with pytest.raises(ValueError, match=words):
        BinaryAUCEvaluation(vim(), ["token_similarity"], tokens=tokens).named_maps(torch.zeros(1, 3, 16, 16))
