"""A step of DINO: two resolutions, head, loss, EMA, optimiser, on the CPU.

Ours as Lightning runs it and as a bare loop; the peer is the reference training loop's algorithm on the same backbone,
weights and crops: all logits at once, a double loop over pairs of views, clipping, optimiser and EMA parameter by
parameter, and a look at the loss in each step. The losses of both are compared first.
"""

import copy
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from measuring import Line, Times, compare
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from backbones import VisionMamba
from backbones.mixers import BidirectionalMamba2
from common.memory import keep_freed_memory
from lightning_modules import DINO
from lightning_modules.clipping import clip_each
from lightning_modules.ema import ema_update

BATCH, STEPS, ROUNDS, OUT = 4, 4, 3, 65536
TEMP, MOMENTUM, LR, WEIGHT_DECAY = 0.04, 0.996, 1e-4, 0.04


def build() -> DINO:
    torch.manual_seed(0)
    return DINO(VisionMamba(embed_dim=256, depth=4), OUT, global_batch_size=BATCH, freeze_last_layer_epochs=0)


def batches() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    sides = [224] * 2 + [96] * 8
    return [{"crops": [torch.randn(BATCH, 3, s, s, generator=g) for s in sides]} for _ in range(STEPS)]


class Reference:
    """The reference's loop; its wrapper also runs the backbone once a resolution."""

    def __init__(self, module: DINO) -> None:
        self.student, self.teacher = module.student, module.teacher
        self.center = torch.zeros(1, OUT)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)

    @staticmethod
    def logits(network: nn.Module, crops: list[Tensor]) -> Tensor:
        sizes = torch.unique_consecutive(torch.tensor([c.shape[-1] for c in crops]), return_counts=True)[1]
        parts = [network.backbone(torch.cat(list(group))) for group in _groups(crops, sizes.tolist())]
        return network.head(torch.cat(parts))

    def loss(self, student: Tensor, teacher: Tensor, views: int) -> Tensor:
        chunks = (student / 0.1).chunk(views)
        targets = F.softmax((teacher - self.center) / TEMP, dim=-1).detach().chunk(2)
        total, count = torch.zeros(()), 0
        for g, target in enumerate(targets):
            for v in range(views):
                if v != g:
                    total = total + torch.sum(-target * F.log_softmax(chunks[v], dim=-1), dim=-1).mean()
                    count += 1
        mean = teacher.sum(0, keepdim=True) / len(teacher)
        self.center = self.center * 0.9 + mean * 0.1
        return total / count

    def step(self, crops: list[Tensor]) -> float:
        with torch.no_grad():
            teacher = self.logits(self.teacher, crops[:2])
        loss = self.loss(self.logits(self.student, crops), teacher, len(crops))
        if not math.isfinite(loss.item()):
            raise FloatingPointError
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                scale = 3.0 / (parameter.grad.norm(2) + 1e-6)
                if scale < 1:
                    parameter.grad.mul_(scale)
        self.optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(MOMENTUM).add_((1 - MOMENTUM) * theirs.detach())
        return loss.item()


def _groups(crops: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [crops[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Bare:
    """Our parts without Lightning."""

    def __init__(self, module: DINO) -> None:
        self.module = module.train()
        self.optimizer = torch.optim.AdamW(module.student.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, crops: list[Tensor]) -> float:
        m = self.module
        with torch.no_grad():
            teacher = m.teacher.head.last_layer(m.teacher(crops[:2])[1])
        z = m.student(crops)[1]
        loss = m.loss.of_prototypes(z, m.student.head.last_layer.prototypes(), teacher, len(crops), TEMP).loss
        self.optimizer.zero_grad()
        loss.backward()
        m.loss.observe(teacher)
        gradients = [p.grad for p in m.student.parameters() if p.grad is not None]
        clip_each(gradients, 3.0)
        self.optimizer.step()
        m.loss.update_center()
        ema_update(m.teacher, m.student, MOMENTUM)
        return loss.item()


def by_lightning(module: DINO, data: list[dict[str, Any]]) -> float:
    """Seconds of a step, the first one left out."""
    times = Times()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[times],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return (times.marks[-1] - times.marks[1]) / (len(data) - 1)


def by_loop(loop: Reference | Bare, data: list[dict[str, Any]]) -> float:
    marks = []
    for batch in data:
        marks.append(time.perf_counter())
        loop.step(batch["crops"])
    return (time.perf_counter() - marks[1]) / (len(data) - 1)


def largest_items(loop: Reference | Bare, data: list[dict[str, Any]]) -> str:
    """The five operations that take most of a step's time themselves, by torch.profiler; the first step left out."""
    loop.step(data[0]["crops"])
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for batch in data[1:]:
            loop.step(batch["crops"])
    found = {item.key: item.self_cpu_time_total / 1e3 / (len(data) - 1) for item in trace.key_averages()}
    largest = sorted(found, key=lambda key: found[key], reverse=True)[:5]
    items = ", ".join(f"{key.removeprefix('aten::')} {found[key]:.0f}" for key in largest)
    return f"{items} of {sum(found.values()):.0f} ms"


def main() -> None:
    keep_freed_memory()
    torch.set_num_threads(2)
    data, module = batches(), build()
    losses = [loop(copy.deepcopy(module)).step(data[0]["crops"]) for loop in (Reference, Bare)]
    assert abs(losses[0] - losses[1]) < 1e-4, losses
    times: dict[str, list[float]] = {"reference": [], "bare": [], "lightning": []}
    for _ in range(ROUNDS):
        times["reference"].append(by_loop(Reference(copy.deepcopy(module)), data))
        times["bare"].append(by_loop(Bare(copy.deepcopy(module)), data))
        times["lightning"].append(by_lightning(copy.deepcopy(module), data))
    what = f"Vim-T of 4 blocks, {BATCH} images x 10 crops, {OUT:,} prototypes"
    lines = [
        Line(what, times["lightning"], "the reference loop's algorithm", times["reference"], "> 1"),
        Line(f"{what}: Lightning's overhead", times["lightning"], "our parts in a bare loop", times["bare"]),
    ]
    operations = copy.deepcopy(module)
    for mixer in operations.modules():
        if isinstance(mixer, BidirectionalMamba2):
            mixer.backend = "torch"
    profiled = {
        "the reference loop": (Reference, module),
        "ours with the mixers in PyTorch's operations": (Bare, operations),
        "ours": (Bare, module),
    }
    notes = [
        f"- Largest items of {name}: {largest_items(loop(copy.deepcopy(start)), data)}."
        for name, (loop, start) in profiled.items()
    ]
    first = f"float32; means of {STEPS - 1} steps. First losses differ by {abs(losses[0] - losses[1]):.1e}."
    compare("dino_step", lines, "\n".join([first, "", *notes]))


if __name__ == "__main__":
    main()
