"""Images of any channels as people look at them; tests/datamodules/test_channels.py has the rest of their way."""

import torch

from common.pictures import pictures
from datamodules.pixel_format import PixelFormat


def test_pictures_of_any_channels():
    class Data:
        def __init__(self, pixels):
            self.pixels, self.mean, self.std = pixels, [0.4] * pixels.in_chans, [0.2] * pixels.in_chans

    values = torch.rand(2, 7, 12, 12)
    shown = {}
    for name, pixels in {
        "grey": PixelFormat(1), "two": PixelFormat(2), "four": PixelFormat(4), "chosen": PixelFormat(7, rgb=(6, 0, 3)),
        "dark": PixelFormat(7, 16), "twelve": PixelFormat(1, 16, 4095), "seven": PixelFormat(1, 8, 127),
    }.items():  # fmt: skip
        scaled = values[:, : pixels.in_chans] * (0.01 if name == "dark" else 1)
        shown[name] = pictures((scaled - 0.4) / 0.2, Data(pixels))
        assert shown[name].shape == (2, 3, 12, 12) and 0 <= shown[name].min() <= shown[name].max() <= 1
    near = {"atol": 1e-5, "rtol": 0}
    torch.testing.assert_close(shown["grey"], values[:, :1].expand(-1, 3, -1, -1), **near)
    torch.testing.assert_close(shown["four"], values[:, :3], **near)
    torch.testing.assert_close(shown["chosen"], values[:, [6, 0, 3]], **near)
    assert not shown["two"][:, 2].any() and shown["dark"].amax((2, 3)).min() > 0.99
