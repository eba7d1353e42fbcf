"""Images of other channels and depths: what is read, refused, written and shown of them."""

import io
import json
import logging
import tarfile

import cv2
import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

from datamodules import ImageNetDataModule, MultiCropConfig, channel_ops, pixel_ops
from datamodules.channels import array_bytes, decode, encode
from datamodules.eval_transforms import ResizeCenterCrop
from datamodules.multicrop import MultiCrop, change
from datamodules.pixel_format import PixelFormat
from datamodules.prepare import imagefolder, statistics
from datamodules.samples import ShardError
from datamodules.statistics import Statistics
from datamodules.transforms import normalize
from datamodules.views import ViewParameters

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (9, 7, 5), dtype=np.uint16)
BYTES = RNG.integers(0, 256, (9, 7, 5), dtype=np.uint8)


def png(array, **options):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG", **options)
    return buffer.getvalue()


def deep_png(array):
    """Through OpenCV, which has channels in the order BGR."""
    return cv2.imencode(".png", array[..., [2, 1, 0, *range(3, array.shape[2])]])[1].tobytes()


def tiff(array, **options):
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, array, **options)
    return buffer.getvalue()


READ = {
    "grey PNG": (lambda: png(BYTES[..., 0]), BYTES[..., :1], {}),
    "grey PNG, 16 bits": (lambda: png(DEEP[..., 0]), DEEP[..., :1], {}),
    "grey in three channels": (lambda: png(np.repeat(BYTES[..., :1], 3, 2)), BYTES[..., :1], {}),
    "grey and alpha": (lambda: png(BYTES[..., :2]), BYTES[..., :2], {}),
    "RGB PNG, 16 bits": (lambda: deep_png(DEEP[..., :3]), DEEP[..., :3], {}),
    "RGBA": (lambda: png(BYTES[..., :4]), BYTES[..., :4], {}),
    "RGBA, 16 bits": (lambda: deep_png(DEEP[..., :4]), DEEP[..., :4], {}),
    "array": (lambda: array_bytes(DEEP), DEEP, {}),
    "array (H, W)": (lambda: array_bytes(DEEP[..., 0]), DEEP[..., :1], {}),
    "array, big endian": (lambda: array_bytes(DEEP.astype(">u2")), DEEP, {}),
    "array, signed": (lambda: array_bytes((DEEP >> 1).astype(np.int16)), DEEP >> 1, {}),
    "floats": (lambda: array_bytes(DEEP.astype(np.float64) - 7.5), (DEEP - 7.5).astype(np.float32), {"bits": 32}),
    "TIFF, bands": (lambda: tiff(DEEP, photometric="minisblack", planarconfig="contig"), DEEP, {}),
    "TIFF, bands in planes": (
        lambda: tiff(DEEP.transpose(2, 0, 1), photometric="minisblack", planarconfig="separate"), DEEP, {}
    ),
    "TIFF, pages": (lambda: tiff(DEEP.transpose(2, 0, 1), photometric="minisblack"), DEEP, {"pages": "bands"}),
    "TIFF, named channels": (
        lambda: tiff(DEEP.transpose(2, 0, 1), photometric="minisblack", metadata={"axes": "CYX"}), DEEP, {}
    ),
    "TIFF, 0 is white": (lambda: tiff(255 - BYTES[..., 0], photometric="miniswhite"), BYTES[..., :1], {}),
    "TIFF, floats": (
        lambda: tiff(DEEP[..., 0].astype(np.float32) - 9), DEEP[..., :1].astype(np.float32) - 9, {"bits": 32}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_values_come_out_as_stored(kind):
    data, wanted, options = READ[kind]
    pixels = PixelFormat(wanted.shape[2], **({"bits": wanted.dtype.itemsize * 8} | options))
    found = decode(data(), "x", pixels)
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    again = decode(encode(found, pixels)[1], "x", pixels)
    assert again.dtype == found.dtype and np.array_equal(again, found)


REFUSED = {
    "other channels": (lambda: array_bytes(DEEP), {"in_chans": 4, "bits": 16}, r"\(9, 7, 5\); wanted \(height, width, 4\)"),
    "channels first": (lambda: array_bytes(DEEP.transpose(2, 0, 1)), {"in_chans": 5, "bits": 16}, r"np\.moveaxis"),
    "a stack": (lambda: array_bytes(DEEP[None]), {"in_chans": 5, "bits": 16}, r"\(1, 9, 7, 5\)"),
    "other bits": (lambda: array_bytes(DEEP), {"in_chans": 5, "bits": 8}, r"uint16; bits=8 takes uint8"),
    "fewer bits": (lambda: array_bytes(BYTES), {"in_chans": 5, "bits": 16}, r"uint8; bits=16"),
    "floats for integers": (lambda: array_bytes(DEEP / 2), {"in_chans": 5, "bits": 16}, r"float64; bits=16"),
    "negative": (lambda: array_bytes(-DEEP.astype(np.int16) // 2), {"in_chans": 5, "bits": 16}, r"values down to -"),
    "no numbers": (lambda: array_bytes(np.full((4, 4), np.nan)), {"in_chans": 1, "bits": 32}, r"has 16 values"),
    "too large for floats": (lambda: array_bytes(np.full((4, 4), 1e300)), {"in_chans": 1, "bits": 32}, r"has 16 val"),
    "truth values": (lambda: array_bytes(DEEP > 9), {"in_chans": 5, "bits": 8}, r"bool; bits=8"),
    "complex": (lambda: array_bytes(DEEP * 1j), {"in_chans": 5, "bits": 32}, r"complex128; bits=32"),
    "above the range": (lambda: array_bytes(DEEP), {"in_chans": 5, "bits": 16, "max_value": 4095}, r"above max_value=4095"),
    "cut off": (lambda: array_bytes(DEEP)[:-9], {"in_chans": 5, "bits": 16}, r"cannot be read"),
    "cut off PNG": (lambda: deep_png(DEEP[..., :3])[:-60], {"in_chans": 3, "bits": 16}, r"cannot be read"),
    "colours for grey": (lambda: png(BYTES[..., :3]), {"in_chans": 1, "bits": 8}, r"\(9, 7, 3\); wanted"),
    "no alpha": (lambda: png(BYTES[..., :3]), {"in_chans": 4, "bits": 8}, r"\(9, 7, 3\); wanted"),
    "16 bits for 8": (lambda: png(DEEP[..., 0]), {"in_chans": 1, "bits": 8}, r"uint16; bits=8"),
    "pages not declared": (
        lambda: tiff(DEEP.transpose(2, 0, 1), photometric="minisblack"), {"in_chans": 5, "bits": 16}, r"5 pages; pages=bands"
    ),
    "a palette": (
        lambda: tiff(BYTES[..., 0], photometric="palette", colormap=np.zeros((3, 256), np.uint16)),
        {"in_chans": 1, "bits": 8}, r"palette",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_have_to_be_guessed_is_refused(kind):
    data, options, message = REFUSED[kind]
    with pytest.raises(ShardError, match=f"^x .*{message}"):
        decode(data(), "x", PixelFormat(**options))


def test_pickles_are_never_loaded():
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ShardError, match=r"cannot be read .*pickle"):
        decode(buffer.getvalue(), "x", PixelFormat(1, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_chans": 0}, "in_chans=0"), ({"in_chans": 513}, "in_chans=513"), ({"bits": 12}, "bits=12"),
        ({"bits": 8, "max_value": 256}, "max_value=256 with bits=8"), ({"rgb": (0, 1, 5)}, r"rgb=\[0, 1, 5\] with in_chans=3"),
        ({"pages": "all"}, "pages='all'"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        PixelFormat(**options)


# ---- views ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 32])
def test_crops_are_pils(size):
    """8 bits within PIL's rounding; 16 bits and floats within a millionth of the scale of mode F."""
    image = RNG.integers(0, 65536, (40, 50, 5), dtype=np.uint16)
    box = (3, 5, 31, 22)
    for pixels, array, mode, tolerance in (
        (PixelFormat(5, 8), (image >> 8).astype(np.uint8), np.uint8, 1),
        (PixelFormat(5, 16), image, np.float32, 0.07),
        (PixelFormat(5, 32), image.astype(np.float32) - 3e4, np.float32, 0.07),
    ):
        found = channel_ops.resized_crop(array, box, size, pixels)
        for channel in range(5):
            cut = Image.fromarray(array[5:27, 3:34, channel].astype(mode)).resize(
                (size, size), Image.Resampling.BICUBIC
            )
            wanted = np.asarray(cut, np.float64)
            if pixels.top is not None:
                wanted = wanted.clip(0, pixels.top)
            assert abs(found[..., channel] - wanted).max() <= tolerance


def test_evaluation_views_are_pils_for_each_channel():
    image = RNG.integers(0, 65536, (30, 40, 4), dtype=np.uint16)
    geometry = ResizeCenterCrop(20, 16)
    found = geometry.channels((image >> 8).astype(np.uint8), PixelFormat(4))
    wanted = np.stack(
        [geometry.image(Image.fromarray((image[..., c] >> 8).astype(np.uint8)).convert("RGB"))[0] for c in range(4)]
    )
    assert found.dtype == np.uint8 and np.array_equal(found, wanted)
    deep = geometry.channels(image, PixelFormat(4, 16))
    assert deep.dtype == np.float32 and deep.max() > 255 and abs(deep / 257 - wanted).mean() < 1


COLOURS = [
    ((0, 1.3),), ((1, 0.6),), ((2, 1.7),), ((3, 0.08),), ((1, 1.4), (0, 0.7), (3, -0.05), (2, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize("jitter", COLOURS, ids=str)
def test_sixteen_bits_of_rgb_change_as_eight_do(jitter):
    """The same picture in 8 bits, through pixel_ops, within what its rounding makes of it."""
    image = (RNG.integers(60, 180, (16, 16, 3)) + np.arange(16)[:, None, None]).astype(np.uint8)
    p = ViewParameters((0, 0, 16, 16), jitter, False, 1.1, True, False)
    wanted = change(image, p).astype(np.float64)
    found = channel_ops.change(image.astype(np.float32) * 257, p, PixelFormat(3, 16)) / 257
    near = abs(wanted - 127.5) > 6  # solarize turns what lies beside its threshold one way or the other
    assert abs(found - wanted)[near].max() < 6 and abs(found - wanted)[near].mean() < 1.5


def test_eight_bits_of_other_channels_change_as_rgb_does():
    """Grey in three channels against the same in five: brightness, contrast, blur and solarize are the same."""
    grey = RNG.integers(0, 256, (16, 16, 1), dtype=np.uint8)
    p = ViewParameters((0, 0, 16, 16), ((1, 1.3), (0, 0.8)), False, 0.9, True, False)
    five = channel_ops.change(np.repeat(grey, 5, 2).astype(np.float32), p, PixelFormat(5, 8))
    view = np.repeat(grey, 3, 2)
    for step, factor in p.jitter:
        view = (pixel_ops.brightness, pixel_ops.contrast)[step](view, factor)
    wanted = pixel_ops.solarize(pixel_ops.gaussian_blur(view, 0.9)).astype(np.float64)
    assert (five == five[..., :1]).all() and (abs(five[..., :3] - wanted) <= 1).mean() > 0.98


def test_solarize_turns_about_the_declared_range():
    values = np.array([[[0], [2047], [2048], [4095]]], np.float32)
    assert channel_ops.solarize(values, PixelFormat(1, 16, 4095)).ravel().tolist() == [0, 2047, 2047, 0]
    assert channel_ops.solarize(values / 4095, PixelFormat(1, 32, 1.0)).max() < 0.5001


def test_views_are_seeded_by_the_sample_and_leave_out_colours():
    config = MultiCropConfig(8, 4, 2, jitter_prob=1, gray_prob=1, solarize_prob=1)
    image = RNG.integers(0, 65536, (20, 24, 5), dtype=np.uint16)
    crops, floats = MultiCrop(config, PixelFormat(5, 16)), MultiCrop(config, PixelFormat(5, 32))
    one, again, other = (crops(image, 0, epoch, 3) for epoch in (0, 0, 1))
    assert [v.shape for v in one] == [(5, 8, 8)] * 2 + [(5, 4, 4)] * 2 and one[0].dtype == np.float32
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True)) and not np.array_equal(one[0], other[0])
    assert not np.array_equal(one[0][0], one[0][1])  # not grey
    drawn = crops.draw(24, 20, 0, 0, 3)
    assert {i for p in drawn for i, _ in p.jitter} == {0, 1} and drawn[1].solarize
    assert not any(p.solarize for p in floats.draw(24, 20, 0, 0, 3))
    plain = MultiCrop(config).draw(24, 20, 0, 0, 3)  # the draws are the same whatever the channels
    assert [p.box for p in plain] == [p.box for p in drawn] and [p.sigma for p in plain] == [p.sigma for p in drawn]


# ---- statistics, shards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_statistics_are_those_of_all_pixels(bits):
    """Images of unequal size, at an offset where sums of squares in floats would lose all digits."""
    shift = {8: 200, 16: 65000, 32: 1e6}[bits]
    images = [
        RNG.normal(shift, 3, (h, 5, 2)).round().clip(0, 255 if bits == 8 else 65535 if bits == 16 else 1e9)
        for h in (3, 8)
    ]
    pixels = PixelFormat(2, bits)
    sums = Statistics(pixels)
    for image in images:
        sums.add(image.astype(pixels.dtype))
    record, flat = sums.record(), np.concatenate([i.reshape(-1, 2) for i in images]) / pixels.scale
    np.testing.assert_allclose(record["mean"], flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(record["std"], flat.std(0), rtol=1e-9)
    assert record["images"] == 2 and record["values_per_channel"] == 55


def test_a_constant_channel_is_said(caplog):
    sums = Statistics(PixelFormat(2, 16))
    sums.add(np.stack([np.full((3, 3), 9), np.arange(9).reshape(3, 3)], -1).astype(np.uint16))
    assert sums.record()["std"][0] == 1 and "channel 0 is 9 everywhere" in caplog.text


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """20 images of 5 channels and 16 bits in two classes, as files and as shards."""
    root = tmp_path_factory.mktemp("bands")
    images = RNG.integers(0, 4096, (20, 18, 22, 5), dtype=np.uint16)
    for i, image in enumerate(images):
        (root / f"files/k{i % 2}").mkdir(parents=True, exist_ok=True)
        np.save(root / f"files/k{i % 2}/{i:02d}.npy", image)
    imagefolder(str(root / "files"), str(root / "shards"), "train", 7, channels=5, bits=16)
    return root, images


def module(root, **options):
    given = {"train_shards": "train-*.tar", "val_shards": "train-*.tar", "batch_size": 5, "num_workers": 0, "seed": 0,
             "resize": 16, "crop": 16, "in_chans": 5, "bits": 16, "multicrop": MultiCropConfig(8, 4, 1)}  # fmt: skip
    return ImageNetDataModule(str(root), **given | options)


def test_shards_hold_them_without_loss_and_batches_are_normalised(bands):
    root, images = bands
    data = module(root / "shards", resize=18, crop=18)
    batches = list(data.val_dataloader())
    keys = [int(key.partition("_")[2]) for batch in batches for key in batch["key"]]
    raw = torch.cat([batch["image"] for batch in batches])
    assert sorted(keys) == list(range(20)) and raw.dtype == torch.float32
    assert np.array_equal(raw.numpy().transpose(0, 2, 3, 1), images[keys][:, :, 2:20].astype(np.float32))
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [key % 2 for key in keys]
    done = torch.cat([data.on_after_batch_transfer(batch, 0)["image"] for batch in list(data.val_dataloader())])
    flat = images.reshape(-1, 5) / 65535
    wanted = (torch.from_numpy(images[keys][:, :, 2:20] / 65535) - torch.tensor(flat.mean(0))) / torch.tensor(
        flat.std(0)
    )
    torch.testing.assert_close(done, wanted.permute(0, 3, 1, 2).float(), atol=1e-4, rtol=1e-4)


def test_half_precision_is_reached_after_normalising():
    image = torch.tensor([65000.0, 65535.0]).view(1, 1, 2)
    found = normalize(image, [0.99], [0.01], torch.float16, 65535)
    torch.testing.assert_close(found.float(), (image / 65535 - 0.99) / 0.01, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("view", ["multicrop", "probe"])
def test_any_number_of_workers_makes_the_same_batches(bands, view):
    entry = "crops" if view == "multicrop" else "image"
    one, two = (
        list(module(bands[0] / "shards", view=view, probe_size=8, num_workers=n).train_dataloader()) for n in (0, 2)
    )
    for a, b in zip(one, two, strict=True):
        pairs = zip(a[entry], b[entry], strict=True)
        assert a["key"] == b["key"] and all(torch.equal(x, y) for x, y in pairs)


def test_a_folder_shows_what_its_shards_show(bands):
    root, _ = bands
    images = {}
    for where, shards in ((root / "shards", "train-*.tar"), (root / "files", ".")):
        transform = {"mean": [0.5] * 5, "std": [0.1] * 5, "val_shards": None, "train_shards": shards}
        for batch in module(where, **transform).predict_dataloader():
            for key, image in zip(batch["key"], batch["image"], strict=True):
                images.setdefault(int(key.rpartition("/")[2].rpartition("_")[2].removesuffix(".npy")), []).append(image)
    assert len(images) == 20 and all(torch.equal(a, b) for a, b in images.values())


def test_statistics_of_shards_and_folders_that_are_there(bands, tmp_path, capsys):
    root, _ = bands
    info = root / "shards/_info.json"
    before = json.loads(info.read_text())
    bare = json.loads(info.read_text())
    del bare["splits"]["train"]["statistics"]
    info.write_text(json.dumps(bare))
    with pytest.raises(ValueError, match=r"python -m datamodules\.prepare statistics --root .*--channels 5 --bits 16"):
        _ = module(root / "shards").mean
    statistics(str(root / "shards"), "train-*.tar", 5, 16)
    printed = capsys.readouterr().out
    assert (
        json.loads(info.read_text()) == before
        and list(module(root / "shards").mean) == before["splits"]["train"]["statistics"]["mean"]
    )
    statistics(str(root / "files"), ".", 5, 16)
    assert capsys.readouterr().out == printed


def test_grey_pictures_stay_what_they_are_in_shards(tmp_path, caplog):
    """JPEG and PNG keep their bytes; one that is not grey stops, or is left out and counted."""
    (tmp_path / "src/k").mkdir(parents=True)
    for name in ("a.jpg", "b.png", "c.bmp"):
        Image.fromarray(BYTES[..., 0]).save(tmp_path / "src/k" / name)
    imagefolder(str(tmp_path / "src"), str(tmp_path / "out"), "train", channels=1)
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        held = {m.name: tar.extractfile(m).read() for m in tar if m.name.endswith(("jpg", "png"))}
    assert len(held) == 3 and (tmp_path / "src/k/a.jpg").read_bytes() in held.values()
    Image.fromarray(BYTES[..., :3]).save(tmp_path / "src/k/d.png")
    with pytest.raises(ShardError, match=r"d\.png is \(9, 7, 3\); wanted \(height, width, 1\)"):
        imagefolder(str(tmp_path / "src"), str(tmp_path / "bad"), "train", channels=1)
    with caplog.at_level(logging.WARNING):
        imagefolder(str(tmp_path / "src"), str(tmp_path / "some"), "train", channels=1, policy="skip")
    assert "left out: 1 ('d.png: " in caplog.text


def test_arrays_of_rgb_become_ordinary_shards(tmp_path):
    (tmp_path / "src/k").mkdir(parents=True)
    np.save(tmp_path / "src/k/a.npy", BYTES[..., :3])
    Image.fromarray(BYTES[..., :3]).save(tmp_path / "src/k/b.png")
    imagefolder(str(tmp_path / "src"), str(tmp_path / "out"), "train", channels=3)
    data = ImageNetDataModule(str(tmp_path / "out"), num_workers=0, val_shards="train-*.tar", resize=7, crop=7)
    (batch,) = data.val_dataloader()
    assert len(batch["key"]) == 2 and torch.equal(*batch["image"]) and batch["image"].dtype == torch.uint8
    with pytest.raises(ShardError, match="--bits 16 and --pages one go with --channels"):
        imagefolder(str(tmp_path / "src"), str(tmp_path / "no"), "train", bits=16)


def test_a_declared_range_of_rgb_holds(tmp_path):
    (tmp_path / "src/k").mkdir(parents=True)
    Image.fromarray(BYTES[..., :3] >> 1).save(tmp_path / "src/k/a.png")
    imagefolder(str(tmp_path / "src"), str(tmp_path / "out"), "train")
    options = {"num_workers": 0, "val_shards": "train-*.tar", "resize": 7, "crop": 7}
    plain, ranged = (ImageNetDataModule(str(tmp_path / "out"), **options, max_value=top) for top in (None, 127))
    (one,), (two,) = plain.val_dataloader(), ranged.val_dataloader()
    assert torch.equal(one["image"].clamp(max=127), two["image"]) and ranged.mean == plain.mean
    with pytest.raises(ShardError, match="above max_value=100; raise it"):
        list(ImageNetDataModule(str(tmp_path / "out"), **options, max_value=100).val_dataloader())


def test_arrays_without_a_word_about_channels(bands, tmp_path):
    with pytest.raises(ShardError, match=r"\.npy is no .*arrays are read where --channels"):
        imagefolder(str(bands[0] / "files"), str(tmp_path), "train")
    data = ImageNetDataModule(str(bands[0] / "shards"), num_workers=0, val_shards="train-*.tar", resize=16, crop=16)
    with pytest.raises(ShardError, match=r"has no image; .*arrays \(\.npy\) are read where data\.init_args\.in_chans"):
        list(data.val_dataloader())


def test_features_beside_images_are_no_samples(tmp_path, caplog):
    """Arrays that somebody keeps in shards of photographs."""
    with wds.TarWriter(str(tmp_path / "train-0.tar")) as tar:
        for i in range(3):
            tar.write({"__key__": f"{i}", "png": png(BYTES[..., :3]), "cls": b"0"})
            tar.write({"__key__": f"f{i}", "npy": array_bytes(np.zeros(4))})
    data = ImageNetDataModule(str(tmp_path), num_workers=0, val_shards="train-*.tar", resize=16, crop=16)
    assert sum(len(batch["key"]) for batch in data.val_dataloader()) == 3
    assert "arrays without an image among samples with one, left out: 3" in caplog.text
