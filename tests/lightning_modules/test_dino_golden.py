"""A whole DINO run against the reference's, through the LightningModule and a Trainer, in float64."""

import re

import torch
from lightning.pytorch import Callback, Trainer
from safetensors import safe_open
from safetensors.torch import load_file

from backbones import MambaReg, VisionMamba
from lightning_modules import DINO
from tests.backbones.test_golden import dims_of
from tests.golden_files import golden_files, present


def number(pattern, text):
    return float(re.search(pattern, text)[1])


class Recorder(Callback):
    """What the run did at each optimiser step."""

    def __init__(self):
        self.rows = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.scheduled = module.scheduled(trainer.global_step) | {"teacher_temp": module.teacher_temp}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rows.append(self.scheduled | {"loss": outputs["loss"].item()})


def open_trajectory(path):
    with safe_open(present(path), "pt") as file:
        return load_file(path), file.metadata()


def build(tensors, meta):
    init = {k.removeprefix("init/"): v.double() for k, v in tensors.items() if k.startswith("init/")}
    state = {k.removeprefix("backbone."): v for k, v in init.items() if k.startswith("backbone.")}
    layers = [k for k in init if re.fullmatch(r"head\.mlp\.\d+\.weight", k)]
    optim, global_size = meta["optim"], tensors["step00/crop0"].shape[-1]
    batch = tensors["step00/crop0"].shape[0]
    teacher_temp = re.search(r"teacher temp (\S+)->(\S+) over (\d+)", optim)
    decay = re.search(r"wd (\S+)->(\S+);", optim)
    momentum = re.search(r"momentum (\S+)->(\S+);", optim)
    sides = {v.shape[-1] for k, v in tensors.items() if k.startswith("step00/crop")}
    family = MambaReg if "pos_embed_cls" in state else VisionMamba
    module = DINO(
        family(**dims_of(state)),
        out_dim=init["head.last_layer.weight_v"].shape[0],
        bottleneck_dim=init["head.last_layer.weight_v"].shape[1],
        hidden_dim=init["head.mlp.0.weight"].shape[0],
        head_layers=len(layers),
        lr=number(r"base lr (\S+)", optim) * 256 / batch,
        min_lr=number(r"min (\S+)", optim),
        warmup_epochs=int(number(r"warmup (\d+)", optim)),
        weight_decay=float(decay[1]),
        weight_decay_end=float(decay[2]),
        momentum=float(momentum[1]),
        momentum_end=float(momentum[2]),
        warmup_teacher_temp=float(teacher_temp[1]),
        teacher_temp=float(teacher_temp[2]),
        warmup_teacher_temp_epochs=int(teacher_temp[3]),
        student_temp=number(r"student temp (\S+);", optim),
        center_momentum=number(r"center momentum (\S+)", optim),
        clip_grad=float(meta["clip"].split()[0]),
        freeze_last_layer_epochs=int(meta["freeze_last_layer_epochs"]),
        num_global_crops=sum(v.shape[-1] == max(sides) for k, v in tensors.items() if k.startswith("step00/crop")),
        global_batch_size=batch,
    )
    assert global_size == max(sides)
    module.student.load_state_dict(init)
    module.teacher.load_state_dict(init)
    return module.double()


def steps_of(tensors):
    steps = sorted({k.split("/")[0] for k in tensors if k.startswith("step")})
    count = sum(k.startswith(steps[0] + "/") for k in tensors)
    return [{"crops": [tensors[f"{s}/crop{i}"].double() for i in range(count)]} for s in steps]


class Epochs(torch.utils.data.IterableDataset):
    """Hands out an epoch's share of the steps each time it is iterated."""

    def __init__(self, steps, per_epoch):
        self.steps, self.per_epoch, self.epoch = steps, per_epoch, 0

    def __len__(self):
        return self.per_epoch

    def __iter__(self):
        start = self.epoch * self.per_epoch
        self.epoch += 1
        return iter(self.steps[start : start + self.per_epoch])


@golden_files("dino_trajectory*.safetensors")
def test_trajectory(path, tmp_path):
    tensors, meta = open_trajectory(path)
    module, per_epoch = build(tensors, meta), int(meta["steps_per_epoch"])
    recorder = Recorder()
    trainer = Trainer(
        max_epochs=int(meta["epochs"]), precision="64-true", accelerator="cpu", logger=False, callbacks=[recorder],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Epochs(steps_of(tensors), per_epoch), batch_size=None)
    trainer.fit(module, loader)

    def column(name):
        return torch.tensor([row[name] for row in recorder.rows], dtype=torch.float64)

    def close(ours, golden, atol):
        torch.testing.assert_close(ours.double(), golden.double(), atol=atol, rtol=0)

    close(column("loss"), tensors["loss"], 1e-6)
    close(column("lr"), tensors["lr"], 1e-12)
    close(column("weight_decay"), tensors["wd"], 1e-12)
    close(column("momentum"), tensors["momentum"], 1e-12)
    close(column("teacher_temp")[::per_epoch], tensors["teacher_temp"], 1e-12)
    close(module.loss.center, tensors["center"], 1e-6)
    for name, value in module.teacher.state_dict().items():
        close(value, tensors[f"final_teacher/{name}"], 1e-6)
