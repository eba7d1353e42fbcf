"""How images were fed to weights: what says so is taken by data that do not, and named where they contradict it."""

import json
import warnings

import pytest
import timm
import torch
from lightning.pytorch import Trainer
from safetensors import safe_open
from safetensors.torch import save_file

from backbones import TimmModel, VisionTransformer, pixels, weights
from datamodules import ImageNetDataModule
from lightning_modules import KNN
from tests.tiny_runs import run

HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AT_HALF = ["--data.mean", "[0.5, 0.5, 0.5]", "--data.std", "[0.5, 0.5, 0.5]"]


def vit():
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2)


@pytest.fixture(scope="module")
def trained_at_half(shards, tmp_path_factory):
    """A DINO checkpoint whose images were normalised by 0.5."""
    folder = run("fit", "dino", shards, tmp_path_factory.mktemp("half"), "vit", *AT_HALF, "--trainer.max_epochs", "1")
    return folder / "checkpoints/last.ckpt"


class Seen(KNN):
    """Keeps the extremes of what it was fed."""

    low, high = float("inf"), float("-inf")

    def forward(self, images):
        self.low, self.high = min(self.low, images.min().item()), max(self.high, images.max().item())
        return super().forward(images)


def seen(module, shards, **data):
    """Evaluates on the demo's images; the warnings."""
    options = {"val_shards": "validation-*.tar", "view": "knn", "num_workers": 0, "batch_size": 8}
    where = ImageNetDataModule(str(shards), **options, **data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(module, where, verbose=False)
    return [str(w.message) for w in caught if "data.init_args.mean" in str(w.message)]


def published(monkeypatch, tmp_path):
    """test_vit as published, mean 0.5, with weights from a file in the place of the hub's."""
    own = timm.create_model("test_vit")
    torch.save(own.state_dict(), tmp_path / "published.pth")
    create = timm.create_model
    overlay = {"file": str(tmp_path / "published.pth")}
    assert timm.get_pretrained_cfg("test_vit").mean == HALF
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **kw: create(name, pretrained_cfg_overlay=overlay, **kw))
        return TimmModel("test_vit", img_size=32, pretrained=True)


def test_timms_configuration_is_taken(monkeypatch, tmp_path, shards):
    module = Seen(published(monkeypatch, tmp_path), num_classes=10, k=[5])
    assert seen(module, shards, resize=32, crop=32) == []
    assert -1 <= module.low < module.high <= 1 + 1e-6  # white, in float32
    module = Seen(published(monkeypatch, tmp_path), num_classes=10, k=[5])
    found = seen(module, shards, resize=32, crop=32, mean=IMAGENET[0], std=IMAGENET[1])
    assert len(found) == 1 and module.low < -1.5
    for said in (
        "data.init_args.mean=[0.485, 0.456, 0.406]",
        "timm's configuration of test_vit",
        "mean [0.5, 0.5, 0.5]",
    ):
        assert said in found[0]


def test_another_size_and_interpolation_are_said(shards, caplog):
    model = vit()
    model.pixels = pixels.Pixels(*IMAGENET, "the file", (24, 24), "bilinear")
    with caplog.at_level("INFO"):
        assert seen(Seen(model, num_classes=10, k=[5]), shards, resize=16, crop=16) == []
    said = "the file says that images were resized by bilinear, of 24 x 24 pixels; evaluated here: 16 x 16, bicubic"
    assert caplog.messages.count(said) == 1


def test_random_weights_want_nothing(shards):
    module = Seen(TimmModel("test_vit", img_size=32), num_classes=10, k=[5])
    assert seen(module, shards, resize=32, crop=32) == [] and module.low < -1.5
    assert module.backbone.pixels is None


def test_timms_own_files(tmp_path):
    """A state by timm's own names is a published one; by ours it was trained by somebody who did not say."""
    model = TimmModel("test_vit")
    torch.save(model.model.state_dict(), tmp_path / "timm.pth")
    weights.load(model, tmp_path / "timm.pth")
    assert model.pixels.mean == HALF and model.pixels.size == (160, 160)
    ours = TimmModel("test_vit")
    torch.save(ours.state_dict(), tmp_path / "ours.pth")
    weights.load(ours, tmp_path / "ours.pth")
    assert ours.pixels is None
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(ours.model.state_dict(), folder / "model.safetensors")
    said = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": [3, 96, 96], "interpolation": "bilinear"}
    (folder / "config.json").write_text(json.dumps({"architecture": "test_vit", "pretrained_cfg": said}))
    weights.load(ours, folder / "model.safetensors")
    assert ours.pixels.mean == (0.1, 0.2, 0.3) and ours.pixels.size == (96, 96)
    assert ours.pixels.interpolation == "bilinear" and "config.json" in ours.pixels.source
    torch.save(ours.state_dict(), folder / "mine.pth")  # of which it does not speak
    weights.load(ours, folder / "mine.pth")
    assert ours.pixels is None


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".ckpt"])
def test_our_checkpoints_and_exports_say_what_they_were_fed(suffix, trained_at_half, shards, tmp_path, capsys):
    path = trained_at_half
    if suffix != ".ckpt":
        model = vit()
        weights.load(model, trained_at_half)
        weights.export(model, path := tmp_path / f"export{suffix}")
    module = Seen(vit(), num_classes=10, k=[5], backbone_weights=str(path))
    assert seen(module, shards, resize=16, crop=16) == []
    assert -1 <= module.low < module.high <= 1 + 1e-6  # white, in float32
    module = Seen(vit(), num_classes=10, k=[5], backbone_weights=str(path))
    found = seen(module, shards, resize=16, crop=16, mean=IMAGENET[0], std=IMAGENET[1])
    assert len(found) == 1 and str(path) in found[0]
    weights.main(["inspect", str(path)])
    assert "images: mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5]" in capsys.readouterr().out
    weights.main(["convert", str(path), str(tmp_path / "again.safetensors")])
    with safe_open(tmp_path / "again.safetensors", "pt") as file:
        assert json.loads(file.metadata()["pixels"])["mean"] == list(HALF)


def test_a_checkpoint_before_the_record(trained_at_half, tmp_path):
    """Its settings say it; without them nothing does."""
    content = torch.load(trained_at_half, weights_only=True)
    assert content.pop("pixels")["mean"] == list(HALF)
    torch.save(content, tmp_path / "older.ckpt")
    assert pixels.of_source(tmp_path / "older.ckpt").mean == HALF
    del content["settings"]
    torch.save(content, tmp_path / "oldest.ckpt")
    assert pixels.of_source(tmp_path / "oldest.ckpt") is None


def test_training_goes_on_as_it_was_fed(trained_at_half, shards, tmp_path):
    """Started from weights, predicted with, and resumed without saying the mean again."""
    start = ["--model.init_weights", str(trained_at_half), "--trainer.max_epochs", "1"]
    folder = run("fit", "dino", shards, tmp_path, "vit", *start)
    last = folder / "checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["pixels"]["mean"] == list(HALF)
    again = ["--trainer.logger.init_args.name", "again", "--trainer.max_epochs", "2"]
    run("fit", "dino", shards, tmp_path, "vit", "--ckpt_path", str(trained_at_half), *again)
    resumed = tmp_path / "again"
    saved = torch.load(resumed / "checkpoints/last.ckpt", weights_only=True)
    assert saved["pixels"]["mean"] == list(HALF) and saved["epoch"] == 1
    changed = json.loads((resumed / "run.json").read_text())["changed_on_resume"]
    assert [change["key"] for change in changed] == ["trainer.max_epochs"]


def test_without_weights(pretrained):
    """ImageNet's is what a run is normalised by that starts from none."""
    saved = torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True)["pixels"]
    assert saved == {"mean": list(IMAGENET[0]), "std": list(IMAGENET[1]), "size": [16, 16]}
