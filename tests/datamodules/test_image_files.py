"""Image files of all kinds on their way into shards, and out of folders as they are."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image, ImageCms

from datamodules import ImageNetDataModule, jpeg_damage
from datamodules.decoding import EncodedImage
from datamodules.image_files import read_image
from datamodules.image_tree import ImageFolder
from datamodules.prepare import PixelRules, imagefolder
from datamodules.samples import ShardError
from datamodules.shards import ShardSet
from datamodules.tally import Tally

RNG = np.random.default_rng(0)
NOISE = Image.fromarray(RNG.integers(0, 256, (20, 24, 3), dtype=np.uint8))
BIG = Image.fromarray(RNG.integers(0, 256, (200, 200, 3), dtype=np.uint8))
HALVES = Image.fromarray(np.repeat(np.array([[[220, 0, 0]], [[0, 0, 0]]], np.uint8), 16, 0).repeat(16, 1))


def save(path, image=NOISE, kind=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, kind, **options)
    return path


def written(src, out, **kwargs):
    """file name -> member, bytes."""
    imagefolder(str(src), str(out), "train", **kwargs)
    shards = ShardSet.find(out, "train-*.tar", "shards")
    reader, found = shards.reader(), {}
    for i in range(len(shards)):
        fields = dict(reader.read(i, ("jpg", "png", "webp", "json")).fields)
        name = json.loads(fields.pop("json"))["filename"]
        ((member, data),) = fields.items()
        found[name] = member, data
    return found


def pixels(data):
    return EncodedImage(data, "it").pixels()


def test_names_and_endings_of_all_kinds(tmp_path, caplog):
    src = tmp_path / "src"
    kept = ["a.b.c.JPG", "a b.JPEG", "ü.png", "line\nbreak.png", "w.webp", "q.jfif", "same.jpg", "same.png"]
    for name in kept:
        save(src / "k" / name, kind={"q.jfif": "JPEG"}.get(name))
    save(src / "k" / "deep" / "wrong.jpg", kind="PNG")
    for name in ("x.bmp", "x.tif", "x.GIF"):
        save(src / "k" / name)
    for name in ("._a.jpg", ".DS_Store", "Thumbs.db"):
        (src / "k" / name).write_bytes(b"x")
    (src / "labels.csv").write_text("x")
    found = written(src, tmp_path / "out")
    for name in kept:
        assert found[f"k/{name}"][1] == (src / "k" / name).read_bytes()
    members = {name.removeprefix("k/"): member for name, (member, _) in found.items()}
    assert members["a.b.c.JPG"] == members["q.jfif"] == "jpg" and members["w.webp"] == "webp"
    assert members["deep/wrong.jpg"] == members["x.bmp"] == members["x.tif"] == members["x.GIF"] == "png"
    for name in ("x.bmp", "x.tif"):
        assert np.array_equal(pixels(found[f"k/{name}"][1]), np.asarray(NOISE))
    assert len(found) == 12
    assert "hidden or system files, left out: 3 (" in caplog.text
    assert "files beside the class folders, left out: 1 ('labels.csv')" in caplog.text
    assert "images in folders below their class's, taken for its own: 1 ('k/deep/wrong.jpg')" in caplog.text
    data = ImageNetDataModule(str(tmp_path / "out"), val_shards="train-*.tar", batch_size=12, num_workers=0)
    (batch,) = data.val_dataloader()
    assert len(set(batch["key"])) == 12 and not any(set(key) & set(".\n/") for key in batch["key"])


def thumbnail(data, keep):
    """An EXIF thumbnail that is a whole JPEG, before a file that ends before (1) or in (2) its pixels."""
    inside = b"Exif\0\0II*\0\x08\0\0\0\0\0" + jpeg(NOISE.resize((8, 8)))
    scan = data.index(b"\xff\xda")
    rest = data[2 : scan + (0 if keep == 1 else (len(data) - scan) // 2)]
    return b"\xff\xd8\xff\xe1" + (len(inside) + 2).to_bytes(2, "big") + inside + rest


def jpeg(image, **kwargs):
    file = io.BytesIO()
    image.save(file, "JPEG", **kwargs)
    return file.getvalue()


def zeroed(data, start, stop):
    start, stop = (int(len(data) * part) for part in (start, stop))
    return data[:start] + bytes(stop - start) + data[stop:]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


FAULTS = {
    "empty": (lambda p: p.write_bytes(b""), "bad.jpg is empty, 0 bytes"),
    "cut off": (lambda p: p.write_bytes(save(p).read_bytes()[:400]), "bad.jpg cannot be read"),
    "a cut PNG": (lambda p: p.write_bytes(save(p, kind="PNG").read_bytes()[:400]), "bad.jpg cannot be read"),
    "text": (lambda p: p.write_bytes(b"hello"), "bad.jpg cannot be read"),
    "a broken link": (lambda p: p.symlink_to(p.with_name("gone")), "bad.jpg is a link to nowhere"),
    "no image after its thumbnail": (lambda p: p.write_bytes(thumbnail(save(p).read_bytes(), 1)), "cut off before its"),
    "cut after its thumbnail": (lambda p: p.write_bytes(thumbnail(save(p).read_bytes(), 2)), "bad.jpg cannot be read"),
    "zeros at the end": (lambda p: p.write_bytes(zeroed(save(p, BIG).read_bytes(), 0.5, 1)), "is damaged: from byte"),
    "zeros inside": (lambda p: p.write_bytes(zeroed(save(p, BIG).read_bytes(), 0.5, 0.8)), "zeros stand in the place"),
    "progressive, zeros at the end": (
        lambda p: p.write_bytes(zeroed(save(p, BIG, progressive=True).read_bytes(), 0.5, 1)),
        "is damaged: from byte",
    ),
    "a PNG's checksum": (
        lambda p: p.write_bytes(flipped(save(p, kind="PNG").read_bytes(), 300)),
        "bad.jpg cannot be read",
    ),
    "a WebP's inside": (
        lambda p: p.write_bytes(flipped(save(p, kind="WEBP", lossless=True).read_bytes(), 30)),
        "bad.jpg cannot be read",
    ),
    "another kind": (lambda p: p.with_suffix(".heic").write_bytes(b"x"), "bad.heic is no .jpg"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_files_that_cannot_be_read(tmp_path, what, caplog):
    make, words = FAULTS[what]
    save(tmp_path / "src/k/good.png")
    make(tmp_path / "src/k/bad.jpg")
    with pytest.raises(ShardError, match=words):
        imagefolder(str(tmp_path / "src"), str(tmp_path / "out"), "train")
    assert not list((tmp_path / "out").glob("*")) or not list((tmp_path / "out").glob("*.tar"))
    assert list(written(tmp_path / "src", tmp_path / "skipped", policy="skip")) == ["k/good.png"]
    assert re.search(r"left out: 1 \(['\"]bad\.", caplog.text)


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def test_orientation_is_a_choice(tmp_path, caplog):
    """Orientation 8 is shown turned left: the upper half is then the left one."""
    save(tmp_path / "src/k/a.jpg", HALVES.resize((64, 32), Image.NEAREST), exif=exif(8), quality=95)
    save(tmp_path / "src/k/b.png", HALVES, exif=exif(8))
    stored = written(tmp_path / "src", tmp_path / "stored")
    assert pixels(stored["k/a.jpg"][1]).shape == (32, 64, 3) and pixels(stored["k/b.png"][1])[0, -1, 0] == 220
    assert "images with an EXIF orientation, which readers ignore (--pixels.orientation apply" in caplog.text
    turned = written(tmp_path / "src", tmp_path / "turned", pixels=PixelRules(orientation="apply"))
    for name, member in (("k/a.jpg", "jpg"), ("k/b.png", "png")):
        found = pixels(turned[name][1])
        assert turned[name][0] == member and found[0, 0, 0] > 200 and found[-1, 0, 0] > 200 and found[0, -1, 0] < 20
        assert Image.open(io.BytesIO(turned[name][1])).getexif().get(0x0112, 1) == 1
    assert pixels(turned["k/a.jpg"][1]).shape == (64, 32, 3)


CLEAR = {
    "RGBA": (Image.new("RGBA", (4, 4), (200, 20, 30, 0)), {}),
    "half": (Image.new("LA", (4, 4), (100, 128)), {}),
    "palette": (Image.new("P", (4, 4), 1), {"transparency": 1}),
}


@pytest.mark.parametrize(("what", "shown", "filled"), [("RGBA", 200, 255), ("half", 100, 177), ("palette", 7, 255)])
def test_what_shows_through(tmp_path, what, shown, filled, caplog):
    image, options = CLEAR[what]
    if what == "palette":
        image.putpalette([0, 0, 0, 7, 7, 7])
    save(tmp_path / "src/k/a.png", image, **options)
    assert pixels(written(tmp_path / "src", tmp_path / "out")["k/a.png"][1])[0, 0, 0] == shown
    assert "images with transparent pixels, whose colours readers show" in caplog.text
    white = written(tmp_path / "src", tmp_path / "white", pixels=PixelRules(background="white"))
    assert pixels(white["k/a.png"][1])[0, 0, 0] == filled
    with pytest.raises(ValueError, match="background='blu' is no colour"):
        PixelRules(background="blu")


def test_depths_and_inks(tmp_path):
    levels = np.array([[0, 256, 32768, 65535]], np.uint16)
    save(tmp_path / "src/k/a.png", Image.fromarray(levels))
    save(tmp_path / "src/k/b.tif", Image.fromarray(levels))
    save(tmp_path / "src/k/c.jpg", Image.new("CMYK", (8, 8), (10, 20, 30, 0)))
    found = written(tmp_path / "src", tmp_path / "out")
    for name in ("k/a.png", "k/b.tif"):
        assert pixels(found[name][1])[0, :, 0].tolist() == [0, 1, 128, 255]
    assert np.abs(pixels(found["k/c.jpg"][1])[0, 0] - np.array([245, 235, 225])).max() <= 2
    save(tmp_path / "src/k/d.tif", Image.new("F", (4, 4), 0.5))
    with pytest.raises(ShardError, match=r"d\.tif has pixels of mode F"):
        imagefolder(str(tmp_path / "src"), str(tmp_path / "float"), "train")


def test_colour_profiles_and_frames(tmp_path, caplog):
    """A profile whose red and blue are exchanged: the same numbers are another colour."""
    srgb = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    save(tmp_path / "src/k/srgb.png", HALVES, icc_profile=bytes(srgb))
    written(tmp_path / "src", tmp_path / "plain")
    assert "profile" not in caplog.text
    red, blue = srgb.index(b"rXYZ", 128), srgb.index(b"bXYZ", 128)
    srgb[red : red + 4], srgb[blue : blue + 4] = b"bXYZ", b"rXYZ"
    other = (
        bytes(srgb)
        .replace(b"s\0R\0G\0B", b"x\0R\0G\0B")
        .replace("sRGB".encode("utf-16-be"), "xBGR".encode("utf-16-be"))
    )
    save(tmp_path / "src/k/other.png", HALVES, icc_profile=other)
    save(tmp_path / "src/k/moving.webp", HALVES, save_all=True, append_images=[NOISE.resize((16, 32))])
    ignored = written(tmp_path / "src", tmp_path / "ignored")
    assert pixels(ignored["k/other.png"][1])[0, 0].tolist() == [220, 0, 0]
    assert "images with a colour profile, which readers ignore (--pixels.profile srgb converts them): 1 ('other.png')" in caplog.text  # fmt: skip
    assert "animated images, of which readers see the first picture: 1 ('moving.webp')" in caplog.text
    converted = written(tmp_path / "src", tmp_path / "srgb", pixels=PixelRules(profile="srgb"))
    r, _, b = pixels(converted["k/other.png"][1])[0, 0].tolist()
    assert b > 150 > r and converted["k/srgb.png"] == ignored["k/srgb.png"]
    save(tmp_path / "src/k/moving.gif", HALVES, save_all=True, append_images=[NOISE.resize((16, 32))])
    with pytest.raises(ShardError, match=r"moving\.gif holds 2 pictures; extract the one"):
        written(tmp_path / "src", tmp_path / "gif")


def test_masks_among_images_are_refused(tmp_path):
    save(tmp_path / "src/k/a.jpg"), save(tmp_path / "src/k/a.mask.png")
    with pytest.raises(ShardError, match=r"a\.mask\.png is called like a mask"):
        written(tmp_path / "src", tmp_path / "out")


def test_links_are_followed_and_not_in_circles(tmp_path, caplog):
    src, real = tmp_path / "src", tmp_path / "real"
    save(real / "a.png"), save(real / "deep/b.png"), save(src / "k2/c.png")
    (src / "k1").symlink_to(real)
    (src / "k2/more").symlink_to(real / "deep")
    (real / "back").symlink_to(src)
    found = written(src, tmp_path / "out", policy="skip")
    assert {name for name in found if "back" not in name} == {"k1/a.png", "k1/deep/b.png", "k2/c.png", "k2/more/b.png"}
    assert "links back to a folder above them, not followed" in caplog.text


def test_a_folder_without_classes(tmp_path, caplog):
    src = tmp_path / "photos"
    for name in ("a.jpg", "b.PNG", "trip/a.jpg"):
        save(src / name)
    (src / "notes.txt").write_text("x")
    with pytest.raises(ShardError, match=r"notes\.txt is no .*--policy skip"):
        imagefolder(str(src), str(tmp_path / "out"), "train", unlabelled=True)
    found = written(src, tmp_path / "out", unlabelled=True, policy="skip")
    assert sorted(found) == ["a.jpg", "b.PNG", "trip/a.jpg"] and not (tmp_path / "out/classes.json").exists()
    labels = json.loads((tmp_path / "out/_info.json").read_text())["splits"]["train"]["labels"]
    assert labels == {"samples": 3, "labelled": 0, "lowest": None, "highest": None}
    with pytest.raises(ShardError, match="goes with neither --classes nor --numbering"):
        imagefolder(str(src), str(tmp_path / "out"), "val", unlabelled=True, classes="imagenet")
    folder = ImageFolder(src)
    assert len(folder) == 3 and len(folder.lengths) == 3 and folder.labels[1:4] == (0, None, None)
    assert folder.read(2, ()).key == "trip/a.jpg" and "cls" not in folder.read(2, ()).fields
    assert "files that are no images, left out: 1 ('notes.txt')" in caplog.text
    (tmp_path / "none").mkdir()
    with pytest.raises(ShardError, match=r"val_shards: .*none holds no image"):
        ImageFolder(tmp_path / "none", "val_shards")


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("progressive", [False, True])
def test_what_is_whole_is_not_called_damaged(optimize, progressive):
    """Flat pictures have long runs of zeros by themselves, thumbnails ends of their own, phones' files something more."""
    for image in (Image.new("L", (600, 400)), Image.new("RGB", (600, 400), "red"), HALVES.resize((600, 400)), NOISE):
        for quality in (10, 75, 100):
            data = jpeg(image, quality=quality, optimize=optimize, progressive=progressive)
            for whole in (data, data + bytes(500), data + b"\xff\xda", thumbnail(data, 2) + data[-len(data) // 2 :]):
                assert jpeg_damage.zeros(whole) is None
            assert jpeg_damage.is_whole(data) and not jpeg_damage.is_whole(data[:-2])


KINDS = {
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is a HEIC image, .*convert it to JPEG or PNG"),
    "AVIF": (b"\0\0\0\x1cftypavif", "is a AVIF image"),
    "video": (b"\0\0\0\x18ftypmp42", "is a video, .*extract its frames"),
    "JPEG XL": (b"\xff\x0a", "is a JPEG XL image"),
    "PSD": (b"8BPS", "is a Photoshop document"),
    "DICOM": (bytes(128) + b"DICM", "is a DICOM file, .*--channels"),
    "SVG": (b"<?xml version='1.0'?><svg>", "is an SVG drawing"),
    "HTML": (b"\n<!DOCTYPE html>", "is a web page"),
    "array": (b"\x93NUMPY", r"is an array \(\.npy\)"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    "nothing known": (b"hello", r"\(UnidentifiedImageError: its first bytes are none of theirs\)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_called_by_their_names(tmp_path, kind):
    start, words = KINDS[kind]
    (tmp_path / "a.jpg").write_bytes(start + bytes(300))
    with pytest.raises(ShardError, match=words) as error:
        read_image(tmp_path / "a.jpg", PixelRules(), Tally())
    assert "object at" not in str(error.value)
    with pytest.raises(ShardError) as error:
        EncodedImage(start + bytes(300), "it")
    assert "object at" not in str(error.value) and "set data.init_args.policy=skip" in str(error.value)


def test_profiles_that_do_not_fit(tmp_path, caplog):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    odd = srgb.replace("sRGB".encode("utf-16-be"), "xRGB".encode("utf-16-be"))
    rules = PixelRules(profile="srgb")
    for mode, profile, words in (
        (
            "L",
            odd,
            r"its colour profile, 'xRGB built-in', is for RGB, and its pixels are L, .*--pixels\.profile ignore",
        ),
        ("CMYK", odd, "is for RGB, and its pixels are CMYK"),
        ("RGB", b"garbage" * 20, "its colour profile is broken"),
    ):
        path = save(tmp_path / f"src/k/{mode}.jpg", NOISE.convert(mode), icc_profile=profile)
        with pytest.raises(ShardError, match=words):
            read_image(path, rules, Tally())
    found = written(tmp_path / "src", tmp_path / "out", pixels=rules, policy="skip")
    assert {name: data for name, (_, data) in found.items()} == {
        f"k/{mode}.jpg": (tmp_path / f"src/k/{mode}.jpg").read_bytes() for mode in ("L", "CMYK", "RGB")
    }
    assert "images whose colour profile does not fit them and was ignored: 3 (" in caplog.text
