"""Images that are not 8-bit RGB, from files to scores and pictures; and what is declared wrong, before the first step."""

import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from datamodules.prepare import imagefolder, imagenet_s, statistics
from tests.tiny_runs import CONFIGS, run

VIT = (
    "model: {{init_args: {{backbone: {{class_path: backbones.VisionTransformer, init_args: "
    "{{img_size: 16, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, in_chans: {}}}}}}}}}"
)


def scene(kind, rng, channels, top):
    """Stripes of one of two directions on a square; the mask is the square."""
    row, column = np.mgrid[:20, :20]
    mask = (abs(row - 9.5) < 6) & (abs(column - 9.5) < 6)
    wave = np.sin((row if kind else column) * 2.0)[..., None] * np.arange(1, channels + 1) / channels
    values = 0.5 + 0.3 * wave * mask[..., None] + rng.normal(0, 0.02, (20, 20, channels))
    return (values.clip(0, 1) * top).round(), mask.astype(np.uint8) + 0


def write(folder, kind, number, channels, bits, rng):
    values, mask = scene(kind, rng, channels, 4095 if bits == 16 else 255)
    path = folder / f"k{kind}" / f"{kind}_{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = values.astype(np.uint16 if bits == 16 else np.uint8)
    if channels == 1:
        Image.fromarray(values[..., 0]).save(f"{path}.png")
    else:
        np.save(f"{path}.npy", values)
    return mask, path.name


@pytest.fixture(scope="module", params=[(5, 16), (1, 8)], ids=["5x16", "1x8"])
def kinds(request, tmp_path_factory):
    """(channels, bits, folder of images, shards with masks): 24 images to train on, 12 to validate."""
    channels, bits = request.param
    root, rng = tmp_path_factory.mktemp("kinds"), np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 6)):
        for kind in (0, 1):
            for number in range(count):
                mask, name = write(root / split, kind, number, channels, bits, rng)
                (root / f"{split}-segmentation/k{kind}").mkdir(parents=True, exist_ok=True)
                Image.fromarray(mask).save(root / f"{split}-segmentation/k{kind}/{name}.png")
    options = {"channels": channels, "bits": bits}
    imagefolder(str(root / "train"), str(root / "shards"), "train", samples_per_shard=9, **options)
    imagenet_s(str(root), str(root / "shards"), "validation", **options)
    return channels, bits, root, root / "shards"


def declared(channels, bits):
    return ["--data.in_chans", str(channels), "--data.bits", str(bits)]


def backbone(out, channels):
    path = out / "channels.yaml"
    path.write_text(VIT.format(channels))
    return ["-c", str(path)]


def test_from_files_to_scores_and_pictures(kinds, tmp_path):
    channels, bits, _, shards = kinds
    info = json.loads((shards / "_info.json").read_text())["splits"]["train"]
    assert info["pixels"] == {"in_chans": channels, "bits": bits} and len(info["statistics"]["mean"]) == channels
    extra = [*backbone(tmp_path, channels), *declared(channels, bits), "--trainer.max_epochs", "1"]
    overlay = [
        "-c", str(CONFIGS / "data/channels.yaml"), "--data.root", str(shards), "--data.num_workers", "0",
        "--data.resize", "16", "--data.crop", "16", *(["--data.rgb", "null"] if channels == 1 else []),
    ]  # fmt: skip
    fitted = run("fit", "dino", shards, tmp_path, "vit", *overlay, *extra)
    with np.load(fitted / "feature_maps.npz") as kept:
        assert kept["images"].shape == (8, 16, 16, 3) and np.ptp(kept["images"]) > 100
    weights = ["--model.backbone_weights", str(fitted / "checkpoints/last.ckpt")]
    knn = run("validate", "knn", shards, tmp_path, "vit", *extra[:-2], *weights, "--model.num_classes", "2")
    assert json.loads((knn / "results.json").read_text())["rows"][0]["queries"] == 12
    if channels > 1:
        probe = run("fit", "linear_probe", shards, tmp_path, "vit", *extra, *weights, "--model.num_classes", "2")
        assert json.loads((probe / "results.json").read_text())["rows"][0]["images"] == 12
    auc = run("validate", "binary_auc", shards, tmp_path, "vit", *extra[:-2], *weights, "--model.pictures", "3")
    with np.load(auc / "results.npz") as kept:
        assert kept["images"].shape == (3, 16, 16, 3) and kept["images"].dtype == np.uint8
        assert np.ptp(kept["images"]) > 100  # 12 bits of 16 are not black
        if channels == 1:
            assert (kept["images"] == kept["images"][..., :1]).all()


def test_a_folder_as_it_is(kinds, tmp_path, caplog):
    channels, bits, root, _ = kinds
    values = json.loads((root / "shards/_info.json").read_text())["splits"]["train"]["statistics"]
    extra = [
        *backbone(tmp_path, channels), *declared(channels, bits), "-c", str(CONFIGS / "data/unlabelled.yaml"),
        "--data.root", str(root / "train"), "--data.train_shards", ".", "--data.num_workers", "0",
        "--data.mean", json.dumps(values["mean"]), "--data.std", json.dumps(values["std"]), "--trainer.max_epochs", "1",
    ]  # fmt: skip
    with caplog.at_level("INFO"):
        assert (run("fit", "dino", root, tmp_path, "vit", *extra) / "checkpoints/last.ckpt").exists()
    assert f"data.init_args.multicrop: off, as images of {channels} channels and {bits} bits" in caplog.text
    assert "jitter of saturation 0.2 and hue 0.1, gray_prob 0.2" in caplog.text


def last_error(capsys, command, task, shards, out, *extra):
    with pytest.raises(SystemExit):
        run(command, task, shards, out, "vit", *extra)
    assert not list(out.glob("*/checkpoints"))
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_statistics_of_a_folder_are_options_to_paste(kinds, tmp_path, capsys, caplog):
    """Nothing is kept beside images, so the message promises nothing that does not hold."""
    channels, bits, root, _ = kinds
    if (channels, bits) == (3, 8):
        pytest.skip("of RGB with 8 bits ImageNet's statistics are taken where none are known: nothing is asked for")
    folder = [
        *backbone(tmp_path, channels), *declared(channels, bits), "-c", str(CONFIGS / "data/unlabelled.yaml"),
        "--data.root", str(root / "train"), "--data.train_shards", ".", "--data.num_workers", "0",
        "--trainer.max_epochs", "1",
    ]  # fmt: skip
    before = sorted((root / "train").rglob("*"))
    last = last_error(capsys, "fit", "dino", root, tmp_path, *folder)
    command = re.search(
        r"statistics --root (\S+) --shards (\S+) --channels (\d+) --bits (\d+) prints them as the", last
    )
    assert command and "nothing is written into a folder of images" in last
    with caplog.at_level("INFO"):
        statistics(command[1], command[2], int(command[3]), int(command[4]))
    options = shlex.split(re.search(r"pass to runs on it: (.*)", caplog.text)[1])
    assert (run("fit", "dino", root, tmp_path, "vit", *folder, *options) / "checkpoints/last.ckpt").exists()
    assert sorted((root / "train").rglob("*")) == before


START = {
    "channels of the backbone": (
        "fit", "dino", ["--model.backbone.init_args.in_chans", "4"],
        "model.init_args.backbone.init_args.in_chans is 4, data.init_args.in_chans is 3",
    ),
    "channels of the data": (
        "fit", "supervised", ["--data.in_chans", "1", "--data.mean", "[0.5]", "--data.std", "[0.2]"],
        "model.init_args.backbone.init_args.in_chans is 3, data.init_args.in_chans is 1",
    ),
    "no statistics": (
        "fit", "dino", ["--data.in_chans", "4", "--model.backbone.init_args.in_chans", "4"], "prepare statistics --root",
    ),
    "statistics of other channels": ("fit", "dino", ["--data.mean", "[0.5]", "--data.std", "[0.2]"], "data.init_args.mean=[0.5] has 1 values"),
    "global crop": ("fit", "dino", ["--data.multicrop.global_size", "18"], "data.init_args.multicrop.global_size=18"),
    "local crop": ("fit", "dino", ["--data.multicrop.local_size", "2"], "data.init_args.multicrop.local_size=2"),
    "validation crop": ("fit", "dino", ["--data.crop", "14"], "data.init_args.crop=14 does not fit VisionTransformer"),
    "probe's validation": ("fit", "linear_probe", ["--data.crop", "14"], "data.init_args.crop=14"),
    "bank": ("validate", "knn", ["--model.k", "[5, 25]"], "model.init_args.k=[5, 25]: the bank, data.init_args.train_shards, holds 24"),
    "no bank": ("validate", "knn", ["--data.view", "probe"], "data.init_args.view=probe: KNN reads knn"),
    "views of another task": ("fit", "dino", ["--data.view", "probe"], "data.init_args.view=probe: DINO reads multicrop"),
    "too few views": (
        "fit", "dino", ["--data.multicrop.num_local", "0", "--model.num_global_crops", "3"], "num_global_crops=3: the data show 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", START)
def test_what_does_not_fit_is_known_before_the_first_step(kind, shards, tmp_path, capsys):
    command, task, extra, message = START[kind]
    assert message in last_error(capsys, command, task, shards, tmp_path, *extra)


def test_shards_of_other_channels_are_known_before_the_first_step(kinds, tmp_path, capsys):
    channels, bits, _, shards = kinds
    message = last_error(capsys, "fit", "dino", shards, tmp_path)
    assert f"data.init_args.in_chans=3, but the shards of the split train in {shards}" in message
    wrong = ["--data.in_chans", str(channels), "--data.bits", "32", *backbone(tmp_path, channels)]
    message = last_error(capsys, "fit", "dino", shards, tmp_path, *wrong)
    assert (
        f"data.init_args.bits=32, but the shards of the split train in {shards} were written with bits={bits}"
        in message
    )


def test_registers_and_timms_sizes(shards, tmp_path, capsys):
    few = ["--data.multicrop.local_size", "4"]
    with pytest.raises(SystemExit):
        run("fit", "dino", shards, tmp_path, "mambar", *few)
    assert "local_size=4 does not fit MambaReg: num_registers=2 wants more than 2 patches" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("fit", "dino", shards, tmp_path, "timm", "--data.multicrop.global_size", "32")
    assert "data.init_args.multicrop.local_size=8 does not fit TimmModel" in capsys.readouterr().err
