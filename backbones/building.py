"""Builds a backbone from what a checkpoint tells about it; :func:`backbones.weights.build` fills it, too."""

import re
from pathlib import Path
from typing import Any

import timm
from torch import Tensor

from backbones.base import Backbone
from backbones.checkpoints import open_checkpoint
from backbones.linear_vit import LinearVisionTransformer
from backbones.mamba_reg import MambaReg
from backbones.mamba_reg_mamba1 import MambaRegMamba1
from backbones.timm_model import TimmModel
from backbones.vim import VisionMamba
from backbones.vim_mamba1 import VimMamba1
from backbones.vit import VisionTransformer
from backbones.weight_files import read

CLASSES: dict[str, type[Backbone]] = {
    cls.__name__: cls
    for cls in (
        VisionTransformer, LinearVisionTransformer, VisionMamba, MambaReg, VimMamba1, MambaRegMamba1, TimmModel,
    )
} | {"SupervisedVim": VimMamba1, "SupervisedMambaReg": MambaRegMamba1}  # fmt: skip


def unfilled(source: str | Path, key: str, checkpoint: str | Path | None) -> tuple[Backbone, str | Path | None]:
    """A backbone and the weights that are still to be loaded, None where it has them; see :func:`weights.build`."""
    name = str(source)
    if not Path(name).expanduser().exists() and "/" not in name and timm.is_model(name):
        return _named(name, pretrained=checkpoint is None), checkpoint
    if checkpoint is not None:
        raise ValueError(f"checkpoint={checkpoint} goes with a name in timm's registry, and {source} is none")
    recorded = read(source).get("hyper_parameters", {}).get("backbone")
    if isinstance(recorded, dict):
        return _recorded(recorded, name), source
    cls, sizes = sizes_of(open_checkpoint(source, key).state, name)
    return cls(**sizes), source


def _named(name: str, pretrained: bool) -> Backbone:
    entry = timm.model_entrypoint(name)
    if entry.__module__.startswith("backbones."):
        if pretrained:
            raise ValueError(f"{name}: no weights are published through timm; give --checkpoint FILE (checkpoint=…)")
        return entry()
    return TimmModel(name, pretrained=pretrained)


def _recorded(config: dict[str, Any], source: str) -> Backbone:
    path = config.get("class_path", "")
    package, _, name = path.rpartition(".")
    if package.split(".")[0] != "backbones" or name not in CLASSES:
        raise ValueError(
            f"{source} is of {path or 'a backbone without class_path'}, a class outside backbones: build it in Python "
            "and use backbones.export.to_onnx"
        )
    arguments = dict(config.get("init_args", {}))
    if name == "TimmModel":
        arguments["pretrained"] = False
    return CLASSES[name](**arguments)


def sizes_of(state: dict[str, Tensor], source: str) -> tuple[type[Backbone], dict[str, Any]]:
    """The family of a state of Vim or Mamba-Reg and the arguments that its shapes tell.

    Args:
        state: as :func:`backbones.checkpoints.open_checkpoint` gives it.
        source: for messages.

    Raises:
        ValueError: for another family's.
    """
    mixer = "layers.0.mixer."
    needed = ("patch_embed.proj.weight", "cls_token", "pos_embed", f"{mixer}in_proj.weight", f"{mixer}conv1d.weight")
    if not all(key in state for key in needed):
        raise ValueError(
            f"{source} does not tell which backbone it is of: only Vim's and Mamba-Reg's weights do (heads of a ViT "
            "leave no shape). Give a run's checkpoint, or NAME of timm's registry with --checkpoint FILE"
        )
    width, in_chans, patch, _ = state["patch_embed.proj.weight"].shape
    registers = "pos_embed_cls" in state
    patches = state["pos_embed"].shape[1] - (0 if registers else 1)
    side = round(patches**0.5)
    if side * side != patches:
        raise ValueError(f"{source}: positions of {patches} patches are no square grid; build the backbone in Python")
    blocks = {int(found[1]) for key in state if (found := re.match(r"layers\.(\d+)\.", key))}
    conv = state[f"{mixer}conv1d.weight"]
    sizes: dict[str, Any] = {
        "img_size": side * patch, "patch_size": patch, "embed_dim": width, "depth": max(blocks) + 1,
        "in_chans": in_chans, "d_conv": conv.shape[-1],
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
    }  # fmt: skip
    if registers:
        sizes["num_registers"] = state["cls_token"].shape[1]
    if f"{mixer}dt_bias" in state:
        inner, heads = len(state[f"{mixer}norm.weight"]), len(state[f"{mixer}dt_bias"])
        sizes |= {"headdim": inner // heads, "d_state": (len(conv) - inner) // 2, "expand": inner // width}
        return (MambaReg if registers else VisionMamba), sizes
    sizes |= {"d_state": state[f"{mixer}A_log"].shape[1], "expand": len(conv) // width}
    if registers:
        neck = state.get("neck.weight")
        sizes["cls_reduce"] = 1 if neck is None else width // len(neck)
        if neck is None:
            sizes["num_classes"] = 0
    return (MambaRegMamba1 if registers else VimMamba1), sizes
