"""Pictures: right side up, aligned, brighter where the map is higher."""

import torch

from callbacks.feature_maps import MAP_COLOURS, colour_map, picture_grid


def test_grid_is_aligned():
    images = torch.zeros(2, 3, 32, 32)
    images[:, :, :16, :8] = 1.0  # the upper left
    maps = torch.zeros(2, 4, 4)
    maps[:, :2, :1] = 5.0
    masks = (images[:, 0] > 0).int() * 7
    grid = picture_grid(images, maps, masks)
    assert grid.shape == (3, 64, 128)
    image, mask, colours, overlay = grid[:, :32].split(32, 2)
    assert torch.equal(image, images[0]) and torch.equal(mask, images[0])
    inside = images[0, 0] > 0
    luminance = colours.mul(torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0)
    assert luminance[inside].min() > luminance[~inside].max()
    torch.testing.assert_close(overlay, 0.5 * image + 0.5 * colours)
    assert picture_grid(images, maps).shape == (3, 64, 96)


def test_colours_run_from_dark_to_light():
    values = torch.linspace(-3, 3, 50).view(1, 1, 50)
    colours = colour_map(values)[0, :, 0]
    assert torch.allclose(colours[:, 0], MAP_COLOURS[0]) and torch.allclose(colours[:, -1], MAP_COLOURS[-1])
    luminance = (colours * torch.tensor([0.299, 0.587, 0.114])[:, None]).sum(0)
    assert (luminance.diff() > 0).all()
    assert colour_map(torch.ones(1, 3, 3)).isfinite().all()
