"""What a user brings in files of their own: a backbone, a method and data, by YAML, with no file of ours touched."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import cli
from datamodules.prepare import write_split

BACKBONE = '''
"""A pyramid of three stages: strided convolutions, a global filter as token mixer, and a norm at the end."""
import torch
from torch import nn
from backbones import HierarchicalBackbone, StageTrace

class Stage(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width_in, width, stride, stride)
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x):
        x = self.down(x)
        branch = self.mix(x)
        x = x + branch
        return x + self.mlp(x), branch

class TinyPyramid(HierarchicalBackbone):
    """Args: widths: of the stages. num_classes: of a classifier."""

    def __init__(self, widths: list[int] = [8, 16, 24], num_classes: int = 0) -> None:
        super().__init__()
        strides = [4] + [2] * (len(widths) - 1)
        self.stages = nn.ModuleList(Stage(*sizes) for sizes in zip([3, *widths], widths, strides))
        self.num_features, self.patch_size = widths[-1], 2 ** (len(widths) + 1)
        self.feature_info = [
            {"num_chs": width, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, width in enumerate(widths)
        ]
        self.norm = nn.GroupNorm(1, widths[-1])
        self.reset_classifier(num_classes)

    def _stages(self, images):
        x = images
        for stage in self.stages:
            x, branch = self._run(stage, x)
            yield StageTrace(x, branch)

    def _normalize(self, stage, features):
        return self.norm(features) if stage == self.depth - 1 else features
'''

METHOD = '''
"""SimCLR (Chen et al. 2020) without EMA: two views of an image attract, all others repel."""
import math
import torch
import torch.nn.functional as F
from torch import nn
from backbones import Backbone
from lightning_modules import Pretraining
from lightning_modules.hparams import record_hyperparameters

class SimCLR(Pretraining):
    """Args: backbone: trained. temperature, dim: of the loss and its space. lr, warmup_epochs: see Pretraining."""

    def __init__(
        self, backbone: Backbone, temperature: float = 0.2, dim: int = 16, lr: float = 0.01, warmup_epochs: int = 0,
        knn_k: int = 5,
    ) -> None:
        super().__init__(backbone, lr=lr, warmup_epochs=warmup_epochs, clip_grad=1.0, knn_k=knn_k)
        record_hyperparameters(self, "backbone")
        self.backbone = backbone
        self.projector = nn.Sequential(nn.Linear(backbone.num_features, 32), nn.ReLU(), nn.Linear(32, dim))

    @property
    def uniform_loss(self) -> float:
        return math.log(2 * self.global_batch_size - 1)

    def training_loss(self, batch):
        first, second = batch["crops"][:2]
        z = F.normalize(self.projector(self.backbone(torch.cat([first, second]))), dim=-1)
        similar = (z @ z.T / self.hparams.temperature).fill_diagonal_(-math.inf)
        other = torch.arange(len(z)).roll(len(first))
        return F.cross_entropy(similar, other), {"alignment": (z * z[other]).sum(-1).mean()}
'''

DATA = '''
"""Images with boxes, as many as there are."""
import json
import cv2
import numpy as np
import torch
from datamodules import Transform
from datamodules.decoding import decode_image

class BoxTransform(Transform):
    """Args: size: side of the image."""

    fields = ("png", "json", "cls")

    def __init__(self, size: int = 32) -> None:
        self.size = size

    def __call__(self, raw, key, rows):
        image = np.asarray(decode_image(raw))
        scale = self.size / image.shape[0]
        boxes = np.array(json.loads(raw.fields["json"])["boxes"], dtype=np.float32).reshape(-1, 4) * scale
        resized = cv2.resize(image, (self.size, self.size)).transpose(2, 0, 1)
        return {"image": np.ascontiguousarray(resized), "boxes": boxes, "label": raw.label()}

    def empty(self):
        return {"image": torch.empty(0, 3, self.size, self.size, dtype=torch.uint8), "boxes": [],
                "label": torch.empty(0, dtype=torch.int64)}
'''

COUNTER = '''
"""Counts an image's boxes from its features: a supervised method over ragged targets."""
import torch
import torch.nn.functional as F
from torch import nn
from backbones import Backbone
from lightning_modules import Pretraining
from lightning_modules.hparams import record_hyperparameters

class BoxCounter(Pretraining):
    headline = "val/correct"

    def __init__(self, backbone: Backbone, lr: float = 0.01) -> None:
        super().__init__(backbone, lr=lr, warmup_epochs=0, knn_k=None)
        record_hyperparameters(self, "backbone")
        self.backbone, self.head = backbone, nn.Linear(backbone.num_features, 4)

    def _loss(self, batch):
        counts = torch.tensor([len(boxes) for boxes in batch["boxes"]], device=self.device)
        assert all(boxes.shape[1:] == (4,) for boxes in batch["boxes"])
        return self.head(self.backbone(batch["image"])), counts

    def training_loss(self, batch):
        logits, counts = self._loss(batch)
        return F.cross_entropy(logits, counts), {}

    def validation_step(self, batch, batch_idx):
        if len(batch["boxes"]):
            logits, counts = self._loss(batch)
            self.log("val/correct", (logits.argmax(1) == counts).float().mean(), batch_size=len(counts))
'''


COMMON = """
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: 2
  log_every_n_steps: 1
data:
  init_args: {root: SHARDS, num_workers: 1, batch_size: 8}
"""
SHAPES = {
    "backbone": "model: {init_args: {backbone: {class_path: my_backbone.TinyPyramid, init_args: {widths: [8, 16]}}}}",
    "simclr": """
data:
  class_path: datamodules.ImageNetDataModule
  init_args: {view: multicrop, train_shards: "train-*.tar", val_shards: "validation-*.tar", resize: 32, crop: 32,
    multicrop: {global_size: 32, num_local: 0}}
model: {class_path: my_method.SimCLR, init_args: {temperature: 0.5}}
""",
    "probe": """
data: {init_args: {train_shards: "train-*.tar", val_shards: "validation-*.tar", resize: 32, crop: 32, probe_size: 32}}
model:
  init_args:
    num_classes: 10
    heads:
      - {n_last_blocks: 2, pooling: cls+max, lr: 0.5}
      - {n_last_blocks: 1, pooling: mean, lr: 0.5}
""",
    "knn": """
data: {init_args: {train_shards: "train-*.tar", val_shards: "validation-*.tar", resize: 32, crop: 32}}
model: {init_args: {num_classes: 10, k: [5]}}
""",
    "auc": """
data: {init_args: {val_shards: "validation-*.tar", resize: 32, crop: 32}}
model: {init_args: {blocks: all, pictures: 3}}
""",
    "boxes": """
data:
  class_path: datamodules.ShardDataModule
  init_args:
    train: {shards: "boxes-*.tar", transform: {class_path: my_data.BoxTransform, init_args: {size: 32}}}
    val: {shards: "boxes-*.tar", transform: {class_path: my_data.BoxTransform, init_args: {size: 32}}}
model: {class_path: my_counter.BoxCounter}
""",
}


@pytest.fixture(scope="module")
def folder(shards, tmp_path_factory):
    """A user's working folder: four files of Python, YAML, and shards with boxes."""
    folder = tmp_path_factory.mktemp("user")
    for name, text in (("backbone", BACKBONE), ("method", METHOD), ("data", DATA), ("counter", COUNTER)):
        (folder / f"my_{name}.py").write_text(text)
        assert len(text.splitlines()) <= 45
    (folder / "common.yaml").write_text(COMMON.replace("SHARDS", str(shards)))
    for name, text in SHAPES.items():
        (folder / f"{name}.yaml").write_text(text)
    rng = np.random.default_rng(0)
    samples = []
    for i in range(20):
        boxes = [[4.0 * j, 2.0, 4.0 * j + 3, 9.0] for j in range(i % 4)]
        png = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (48, 48, 3), np.uint8)).save(png, "png")
        samples.append(
            {"__key__": f"{i:03d}", "png": png.getvalue(), "cls": b"0", "json": json.dumps({"boxes": boxes}).encode()}
        )
    write_split(folder / "shards", "boxes", samples, 7)
    return folder


@pytest.fixture
def dinomamba(folder, monkeypatch, capfd):
    """``dinomamba COMMAND -c base.yaml -c FILE …`` as typed in that folder: exit code and the last line of its errors."""

    def command(verb, *files, extra=()):
        args = [a for f in ("base.yaml", *files) for a in ("-c", f)]
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "path", [p for p in sys.path if p])
            try:
                cli.main([verb, *args, *extra])
            except SystemExit as stop:
                return stop.code, capfd.readouterr().err.strip().splitlines()[-1]
        return 0, ""

    return command


@pytest.fixture
def run(folder, dinomamba):
    """The folder of a run that must end well."""

    def command(name, verb, *files, extra=()):
        assert dinomamba(verb, *files, extra=(*extra, "--trainer.logger.init_args.name", name)) == (0, "")
        return folder / "runs" / name

    return command


def results(run):
    return json.loads((run / "results.json").read_text())


EVALUATIONS = {  # name -> verb, and files before common.yaml and NAME.yaml
    "probe": ("fit", "task/linear_probe.yaml", "data/demo.yaml"),
    "knn": ("validate", "task/knn.yaml", "data/demo.yaml"),
    "auc": ("validate", "task/binary_auc.yaml", "data/demo_s.yaml"),
}


def test_a_backbone_and_a_method(run):
    """Pretraining resumes; probe, k-NN and Binary-AUC read its weights and each stage's own width and grid."""
    files = ("simclr.yaml", "common.yaml", "backbone.yaml")
    pretrained = run("simclr", "fit", *files)
    assert torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    assert (pretrained / "checkpoints/best.ckpt").exists()  # by the base's k-NN
    run("simclr", "fit", *files, extra=["--trainer.max_epochs", "3", "--ckpt_path", "auto"])
    assert torch.load(pretrained / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 9

    weights = ["--model.init_args.backbone_weights", str(pretrained / "checkpoints/last.ckpt")]
    found = {
        name: run(name, verb, *files, "common.yaml", f"{name}.yaml", "backbone.yaml", extra=weights)
        for name, (verb, *files) in EVALUATIONS.items()
    }
    probe, knn, auc = (results(found[name]) for name in EVALUATIONS)
    assert probe["complete"] and probe["backbone"] == "TinyPyramid" and "lightning" in probe["weights"]
    assert [row["parameters"] for row in probe["rows"]] == [10 * (2 * (8 + 16) + 1), 10 * 17]
    assert knn["rows"][0]["bank"] == 24 and knn["rows"][0]["queries"] == 20
    # a pyramid has no mixing matrix: those maps are left out
    names = [("block0/similarity", 0), ("block1/similarity", 1), ("shuffled", 1), ("position", 1)]
    assert [(row["map"], row["block"]) for row in auc["rows"]] == names
    with np.load(found["auc"] / "results.npz") as kept:
        assert kept["maps/block0/similarity"].shape == (3, 8, 8) and kept["maps/block1/similarity"].shape == (3, 4, 4)

    _, *files = EVALUATIONS["auc"]
    predicted = run("predicted", "predict", *files, "common.yaml", "auc.yaml", "backbone.yaml", extra=weights)
    parts = [np.load(path) for path in sorted((predicted / "predictions").glob("*.npz"))]
    assert sum(len(part["key"]) for part in parts) == 20 and parts[0]["embedding"].shape[1] == 16
    assert parts[0]["maps/block0/similarity"].shape[1:] == (8, 8)


def test_data_with_ragged_targets(run):
    found = run("boxes", "fit", "boxes.yaml", "common.yaml", "backbone.yaml", extra=["--data.init_args.root", "shards"])
    assert torch.load(found / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert (found / "checkpoints/best.ckpt").exists()


def test_what_a_user_gets_wrong_is_said_in_a_line(folder, dinomamba):
    (folder / "wrong.yaml").write_text("model: {init_args: {temprature: 0.5}}")
    code, said = dinomamba("fit", "simclr.yaml", "common.yaml", "backbone.yaml", "wrong.yaml")
    assert code == 2 and "did you mean 'temperature'?" in said
    (folder / "wrong.yaml").write_text("model: {init_args: {backbone: {class_path: my_backbone.Pyramid}}}")
    code, said = dinomamba("fit", "simclr.yaml", "common.yaml", "wrong.yaml")
    assert code == 2 and "my_backbone.Pyramid" in said
