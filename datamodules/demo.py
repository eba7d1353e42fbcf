"""The embedded data set: small grey scenes drawn offline, ten classes told by texture alone, with object masks.

Each scene is one object of random shape, place and size on a shaded background. The class is the object's texture.
Everything else is drawn at random and independently of it: the object's outline and position, the polarity of its
pattern (light on dark or dark on light), phase, wavelength, a small rotation, and the background's shading and noise.
There is no colour, and the mean brightness of object and background is the same for all classes but the plain one,
which has nothing else to stand out by.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SIDE = 64
CLASSES = (
    "horizontal stripes", "vertical stripes", "diagonal stripes", "checkerboard", "dots",
    "rings", "grid", "plain", "blobs", "zigzag",
)  # fmt: skip


class Scene(NamedTuple):
    """One drawn sample."""

    image: np.ndarray
    """(64, 64, 3) uint8, three equal channels."""
    mask: np.ndarray
    """(64, 64) uint8: 0 background, label + 1 on the object."""
    label: int


def _smooth_noise(rng: np.random.Generator, cells: int) -> np.ndarray:
    """(SIDE, SIDE) noise in about [-1, 1], varying over SIDE / cells pixels."""
    grid = rng.uniform(-1, 1, (cells + 3, cells + 3))
    at = np.linspace(1, cells + 1, SIDE)
    low, t = at.astype(int), at - at.astype(int)
    t = t * t * (3 - 2 * t)
    rows = grid[low] * (1 - t)[:, None] + grid[low + 1] * t[:, None]
    return rows[:, low] * (1 - t) + rows[:, low + 1] * t


def _texture(rng: np.random.Generator, label: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The class's pattern in [-1, 1] over pixel coordinates centred on the object."""
    wavelength = rng.uniform(8, 14)
    angle = rng.uniform(-0.15, 0.15)
    if label == 2:
        angle += rng.choice([-1, 1]) * np.pi / 4
    u = (x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / wavelength + rng.uniform(0, 2 * np.pi)
    v = (y * np.cos(angle) - x * np.sin(angle)) * 2 * np.pi / wavelength + rng.uniform(0, 2 * np.pi)
    name = CLASSES[label]
    if name in ("horizontal stripes", "diagonal stripes"):
        pattern = np.sin(v)
    elif name == "vertical stripes":
        pattern = np.sin(u)
    elif name == "checkerboard":
        pattern = np.sin(u) * np.sin(v) * 2
    elif name == "dots":
        pattern = (np.cos(u) + np.cos(v) - 0.7) * 1.2
    elif name == "rings":
        pattern = np.sin(np.hypot(x, y) * 2 * np.pi / wavelength + rng.uniform(0, 2 * np.pi))
    elif name == "grid":
        pattern = (np.maximum(np.cos(u), np.cos(v)) - 0.6) * 2.5
    elif name == "plain":
        return np.zeros_like(x)
    elif name == "blobs":
        pattern = _smooth_noise(rng, 9) * 2
    else:
        zigzag = np.abs((u / np.pi) % 2 - 1) * 2 * np.pi
        pattern = np.sin(v + zigzag)
    return np.clip(pattern * 1.5, -1, 1)


def _outline(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Whether each pixel lies in a random star-shaped outline about the origin."""
    radius, stretch, turn = rng.uniform(18, 26), rng.uniform(0.75, 1.33), rng.uniform(0, np.pi)
    a, b = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    a, b = a * np.sqrt(stretch), b / np.sqrt(stretch)
    theta, lobes = np.arctan2(b, a), rng.integers(2, 6)
    edge = radius * (1 + rng.uniform(0, 0.22) * np.cos(lobes * theta + rng.uniform(0, 2 * np.pi)))
    return np.hypot(a, b) < edge


def draw_scene(label: int, seed: int, index: int) -> Scene:
    """One scene; a function of its arguments alone."""
    rng = np.random.default_rng([seed, index, label])
    row, column = np.mgrid[:SIDE, :SIDE].astype(float)
    y, x = row - rng.uniform(24, SIDE - 24), column - rng.uniform(24, SIDE - 24)
    inside = _outline(rng, y, x)
    back, front = 0.5 + rng.uniform(-0.03, 0.03), 0.5 + rng.uniform(-0.03, 0.03)
    contrast = 0.3 * rng.choice([-1, 1])
    if CLASSES[label] == "plain":
        front += contrast
    slope, turn = rng.uniform(0, 0.06), rng.uniform(0, 2 * np.pi)
    shading = slope * ((row - SIDE / 2) * np.cos(turn) + (column - SIDE / 2) * np.sin(turn)) / (SIDE / 2)
    scene = np.where(inside, front + contrast * _texture(rng, label, y, x), back) + shading
    scene = scene + rng.normal(0, 0.03, scene.shape)
    grey = (np.clip(scene, 0, 1) * 255).round().astype(np.uint8)
    mask = np.where(inside, label + 1, 0).astype(np.uint8)
    return Scene(np.repeat(grey[..., None], 3, -1), mask, label)


def scenes(count: int, seed: int) -> Iterator[Scene]:
    """``count`` scenes, the classes in turn."""
    for index in range(count):
        yield draw_scene(index % len(CLASSES), seed, index)


SHIFTS = ("none", "other", "faint", "strong", "noisy", "negative", "lines")


def shifted_scenes(shift: str, classes: Sequence[int], per_class: int) -> Iterator[tuple[np.ndarray, int]]:
    """(64, 64, 3) uint8 scenes of some classes, the classes in turn, as a test set drawn another way would show them.

    Args:
        shift: ``none``; ``other`` scenes; ``faint``, ``strong``: less or more contrast; ``noisy``; ``negative``;
            ``lines``: dark edges on white.
        classes: class numbers.
        per_class: scenes of each.
    """
    for index in range(per_class * len(classes)):
        label = classes[index % len(classes)]
        seed = 10 + SHIFTS.index(shift)
        grey = draw_scene(label, seed, index).image[..., 0].astype(float)
        if shift in ("faint", "strong"):
            grey = 128 + (grey - 128) * (0.5 if shift == "faint" else 1.6)
        elif shift == "noisy":
            grey += np.random.default_rng([seed, index]).normal(0, 25, grey.shape)
        elif shift == "negative":
            grey = 255 - grey
        elif shift == "lines":
            rows, columns = np.gradient(grey)
            grey = 255 - 6 * np.hypot(rows, columns)
        yield np.repeat(grey.clip(0, 255).round().astype(np.uint8)[..., None], 3, -1), label
