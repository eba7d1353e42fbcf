"""Necks against torchvision's, at odd sizes, and what they refuse."""

from collections import OrderedDict

import pytest
import torch
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from heads import FPN, build_neck
from heads.layers import ChannelLayerNorm
from heads.necks import KINDS, PLAIN

PYRAMID = [8, 12, 16, 20]


def maps(widths, sizes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, width, *size, generator=g) for width, size in zip(widths, sizes, strict=True)]


def test_fpn_is_torchvisions():
    torch.manual_seed(0)
    ours = FPN(PYRAMID, [4, 8, 16, 32], 6)
    theirs = FeaturePyramidNetwork(PYRAMID, 6, LastLevelMaxPool())
    with torch.no_grad():
        for i in range(4):
            for mine, other in ((ours.lateral_convs, theirs.inner_blocks), (ours.fpn_convs, theirs.layer_blocks)):
                torch.nn.init.normal_(mine[i].conv.bias)
                other[i][0].weight.copy_(mine[i].conv.weight)
                other[i][0].bias.copy_(mine[i].conv.bias)
    given = [x.requires_grad_() for x in maps(PYRAMID, [(25, 37), (13, 19), (7, 10), (4, 5)])]
    found = ours(given)
    wanted = list(theirs(OrderedDict((str(i), x) for i, x in enumerate(given))).values())
    assert ours.strides == [4, 8, 16, 32, 64] and len(found) == 5
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    gradients = [
        torch.autograd.grad(sum(x.square().sum() for x in out), given, retain_graph=True) for out in (found, wanted)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", PLAIN)
def test_levels_of_a_plain_backbone(kind):
    """At an odd grid too: sides are those of the strides, rounded down where it shrinks."""
    neck = build_neck(kind, [12] * 4, [16] * 4, 6)
    found = neck(maps([12] * 4, [(7, 9)] * 4))
    sizes = [(28, 36), (14, 18), (7, 9), (3, 4), (2, 2)]
    assert [tuple(x.shape[2:]) for x in found] == sizes[: len(found)]
    assert [x.shape[1] for x in found] == neck.out_channels and neck.strides == [4, 8, 16, 32, 64][: len(found)]


def test_identity_leaves_maps_as_they_are():
    neck = build_neck("identity", PYRAMID, [4, 8, 16, 32], 6)
    given = maps(PYRAMID, [(8, 8), (4, 4), (2, 2), (1, 1)])
    assert all(a is b for a, b in zip(neck(given), given, strict=True)) and neck.out_channels == PYRAMID


def test_channel_layer_norm_is_that_of_each_position():
    norm = ChannelLayerNorm(5)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    (x,) = maps([5], [(3, 4)])
    wanted = torch.nn.functional.layer_norm(x[1, :, 2, 3], (5,), norm.weight, norm.bias, 1e-6)
    torch.testing.assert_close(norm(x)[1, :, 2, 3], wanted)


@pytest.mark.parametrize(
    ("kind", "widths", "strides", "said"),
    [
        ("fpn", [8] * 4, [16] * 4, "maps are all of one size; allowed for such: multilevel, feature2pyramid"),
        ("simple", PYRAMID, [4, 8, 16, 32], "maps shrink from stage to stage; allowed for such: identity, fpn"),
        ("fpn", PYRAMID, [4, 8, 16, 48], "must double from map to map"),
        ("feature2pyramid", [8, 8, 8, 9], [16] * 4, "takes maps of one width, found .8, 8, 8, 9."),
        ("multilevel", [8] * 3, [16] * 3, "takes 4 maps, found 3: name 4 taps"),
        ("pyramid", [8] * 4, [16] * 4, f"neck='pyramid'; allowed: {', '.join(KINDS)}"),
    ],
)
def test_what_does_not_fit_is_named(kind, widths, strides, said):
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        build_neck(kind, widths, strides, 6)
