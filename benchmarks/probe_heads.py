"""Linear probing: the heads of Table 5 trained together on one backbone pass, against each head trained alone.

One training step of LinearProbe (forward, losses, backward, SGD) on the same 16 images of 224 px and 1,000 classes;
alone is the sum over the heads, each with its own backbone pass, as the reference's script runs once for each setting.

And a whole probe of ten epochs over 512 JPEGs: encoded once, against encoded in each epoch, as with augmentation.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from lightning.pytorch import Trainer
from measuring import Line, compare, in_turns

from backbones import VisionMamba
from common.memory import keep_freed_memory
from datamodules import ImageNetDataModule, prepare
from lightning_modules import HeadSpec, LinearProbe

SPECS = [
    HeadSpec(n, "cls", lr, wd) for n, wd, lr in product((1, 2, 4, 8), (0.0, 1e-3, 1e-2), (5e-4, 1e-3, 2e-3))
]  # configs/paper/imagenet/table5.yaml
BATCH = 16
IMAGES, EPOCHS = 512, 10


def step(probe: LinearProbe, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    losses = [torch.nn.functional.cross_entropy(y, labels) for y in probe.logits(probe.encode(images))]
    optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    optimizer.step()


def training(backbone: VisionMamba, specs: list[HeadSpec], images: torch.Tensor, labels: torch.Tensor) -> Callable:
    """One step of these heads."""
    probe = LinearProbe(backbone, specs).train()
    optimizer = torch.optim.SGD(probe.heads.parameters(), lr=0.1, momentum=0.9)
    return partial(step, probe, optimizer, images, labels)


def whole_probe(backbone: VisionMamba, root: str, view: str) -> None:
    """Ten epochs of training and validation."""
    data = ImageNetDataModule(root, view=view, batch_size=32, num_workers=2, seed=0)
    trainer = Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(LinearProbe(backbone, [HeadSpec(4)], num_classes=10, global_batch_size=32), data)


def main() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # Lightning's, of workers and a missing logger: they would stand in the table
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))
    backbone = VisionMamba(embed_dim=256)
    # the heads differ in cost by the blocks they read only: one of each, times nine
    contenders = {"together": training(backbone, SPECS, images, labels)}
    contenders |= {f"last {n}": training(backbone, [HeadSpec(n)], images, labels) for n in (1, 2, 4, 8)}
    times = in_turns(contenders, 3)
    alone = [9 * sum(parts) for parts in zip(*(t for who, t in times.items() if who != "together"), strict=True)]
    step_name = f"Vim-T, a step of {len(SPECS)} probe heads, {BATCH} images"
    lines = [Line(step_name, times["together"], "each head alone, as the reference trains them", alone)]
    with tempfile.TemporaryDirectory() as root:
        prepare.demo(root, train=IMAGES, validation=32)
        views = {
            view: partial(whole_probe, VisionMamba(embed_dim=256, depth=4), root, view)
            for view in ("features", "probe")
        }
        times = in_turns(views, 2)
    probe_name = f"Vim-T of 4 blocks, {EPOCHS} epochs of a probe, {IMAGES} images"
    lines += [Line(probe_name, times["features"], "view probe: images in each epoch", times["probe"])]
    compare("probe_heads", lines)


if __name__ == "__main__":
    main()
