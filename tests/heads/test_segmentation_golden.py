"""Necks and segmentation heads against mmsegmentation's and detectron2's outputs, in float64."""

import json

import pytest
import torch
from safetensors import safe_open

from heads import FCNHead, Feature2Pyramid, MultiLevelNeck, SimpleFeaturePyramid, UPerHead, segmentation_loss
from heads.layers import resize
from tests.golden_files import golden_files, present


def opened(path):
    """(tensors by name, doubles where they are floats; configuration)."""
    with safe_open(present(path), "pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        config = json.loads(file.metadata()["config"])
    return {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}, config


def state(tensors, prefix):
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def maps_of(tensors):
    return [tensors[f"in.x{i}"] for i in range(sum(k.startswith("in.x") for k in tensors))]


def close(found, wanted, name=""):
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5, msg=lambda text: f"{name}: {text}")


@golden_files("dense/neck_multilevel*.safetensors")
def test_multilevel_neck_dense(path):
    tensors, config = opened(path)
    maps = maps_of(tensors)
    neck = MultiLevelNeck([x.shape[1] for x in maps], 16, config["dim"]).double()
    neck.load_state_dict(state(tensors, "in.neck."))
    for i, found in enumerate(neck(maps)):
        close(found, tensors[f"out.y{i}"], f"y{i}")


@golden_files("dense/neck_feature2pyramid*.safetensors")
def test_feature2pyramid_neck_dense(path):
    tensors, config = opened(path)
    for mode in ("eval", "train"):
        neck = Feature2Pyramid(config["dim"], 16).double().train(mode == "train")
        neck.load_state_dict(state(tensors, "in.neck."))
        for i, found in enumerate(neck(maps_of(tensors))):
            close(found, tensors[f"out.{mode}.y{i}"], f"{mode} y{i}")


@golden_files("dense/simple_pyramid*.safetensors")
def test_simple_feature_pyramid_dense(path):
    tensors, config = opened(path)
    neck = SimpleFeaturePyramid(config["dim"], 16, config["out_channels"]).double()
    neck.load_state_dict(state(tensors, "in.neck."))
    x = tensors["in.x"].requires_grad_()
    levels = neck([x])
    assert neck.strides == [4, 8, 16, 32, 64] and len(levels) == 5
    for i, found in enumerate(levels, 2):
        close(found, tensors[f"out.p{i}"], f"p{i}")
    upstream = [(torch.arange(level.numel()) % 5 - 2).double().view_as(level) for level in levels]
    (grad,) = torch.autograd.grad(levels, x, upstream)
    close(grad, tensors["out.grad.x"], "gradient")


@pytest.fixture
def upernet(path):
    tensors, config = opened(path)
    widths = [x.shape[1] for x in maps_of(tensors)]
    decode = UPerHead(widths, config["channels"], config["classes"], config["pool_scales"], config["dropout_ratio"])
    index = config["aux_in_index"]
    aux = FCNHead(
        widths[index], config["aux_channels"], config["classes"], config["aux_num_convs"], index,
        config["dropout_ratio"],
    )  # fmt: skip
    decode.double().load_state_dict(state(tensors, "in.decode_head."))
    aux.double().load_state_dict(state(tensors, "in.auxiliary_head."))
    return tensors, config, decode, aux


@golden_files("dense/upernet*.safetensors")
def test_upernet_evaluates_dense(upernet):
    tensors, config, decode, aux = upernet
    maps = maps_of(tensors)
    decode.eval(), aux.eval()
    logits = decode(maps)
    close(logits, tensors["out.eval.decode.logits"], "logits")
    close(decode.pyramid_pooling(maps[-1]), tensors["out.eval.decode.psp"], "pyramid pooling")
    close(aux(maps), tensors["out.eval.aux.logits"], "auxiliary logits")
    close(resize(logits, config["image"])[0], tensors["out.eval.decode.resized_image0"], "at the image's size")


@golden_files("dense/upernet*.safetensors")
def test_upernet_trains_dense(upernet):
    tensors, config, decode, aux = upernet
    maps = [x.requires_grad_() for x in maps_of(tensors)]
    losses = {
        name: segmentation_loss(head(maps), tensors["in.label"], config["ignore_index"])
        for name, head in (("decode", decode), ("aux", aux))
    }
    weights = {"decode": 1.0, "aux": config["aux_loss_weight"]}
    for name, found in losses.items():
        close(found.loss * weights[name], tensors[f"out.train.{name}.loss_ce"], f"{name} loss")
        close(100 * found.accuracy, tensors[f"out.train.{name}.acc_seg"].squeeze(), f"{name} accuracy")
    loss = sum(weights[name] * found.loss for name, found in losses.items())
    close(loss, tensors["out.train.loss"], "loss")
    loss.backward()
    for i, x in enumerate(maps):
        close(x.grad, tensors[f"out.train.grad.x{i}"], f"gradient of x{i}")
    compared = 0
    for name, head in (("decode_head", decode), ("auxiliary_head", aux)):
        for key, parameter in head.named_parameters():
            close(parameter.grad, tensors[f"out.train.grad.{name}.{key}"], f"gradient of {name}.{key}")
            compared += 1
        for key, after in state(tensors, f"out.train.after.{name}.").items():
            close(head.get_buffer(key), after.double(), f"{name}.{key} after a forward pass")
            compared += 1
    left = [k for k in tensors if k.startswith(("out.train.grad.decode", "out.train.grad.aux", "out.train.after"))]
    assert compared == len(left)
