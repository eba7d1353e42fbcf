"""The embedded data set: small scenes drawn offline, ten classes told by their objects, with object masks.

A scene shows a few objects of one make, anywhere, on gravel. The class is the objects' texture; their hue goes with it,
but hues of neighbouring classes overlap. What else the objects of a scene have in common is drawn at random: their
texture's wavelength, rotation and polarity (light on dark or dark on light). Outlines, places and phases are each
object's own. The background is speckle with the same mean in all scenes; it says nothing, nor does the place: objects
stand at the border as often as in the middle.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SIDE = 96
CLASSES = (
    "horizontal stripes", "vertical stripes", "diagonal stripes", "checkerboard", "dots",
    "rings", "grid", "plain", "blobs", "zigzag",
)  # fmt: skip
OBJECTS = (2, 4)
"""Fewest and most in a scene."""
RADIUS = (17, 24)
"""Of an object before it is stretched, in pixels."""
REACH = 36
"""No outline goes further from its origin, in pixels."""
LEAST_SEEN = 100
"""Pixels of an object of a dense scene, below which it is left out."""
HUE_SPREAD = 0.07
"""A scene's hue lies so far from its class's at most, in turns; the classes' are a tenth of a turn apart."""
GROUND = np.array([0.485, 0.456, 0.406])
"""The background's mean colour."""


class Scene(NamedTuple):
    """One drawn sample."""

    image: np.ndarray
    """(96, 96, 3) uint8."""
    mask: np.ndarray
    """(96, 96) uint8: 0 background, label + 1 on the objects."""
    label: int


def _smooth_noise(rng: np.random.Generator, cells: int, side: int = SIDE) -> np.ndarray:
    """(side, side) noise in about [-1, 1], varying over side / cells pixels."""
    grid = rng.uniform(-1, 1, (cells + 3, cells + 3))
    at = np.linspace(1, cells + 1, side)
    low, t = at.astype(int), at - at.astype(int)
    t = t * t * (3 - 2 * t)
    rows = grid[low] * (1 - t)[:, None] + grid[low + 1] * t[:, None]
    return rows[:, low] * (1 - t) + rows[:, low + 1] * t


def _speckle(rng: np.random.Generator) -> np.ndarray:
    """(SIDE, SIDE) noise of mean 0 and variance 1, of 3 to 12 pixels."""
    noise = np.sum([_smooth_noise(rng, cells) / cells**0.5 for cells in (8, 16, 32)], 0)
    return (noise - noise.mean()) / noise.std()


def _ground(rng: np.random.Generator) -> np.ndarray:
    """(SIDE, SIDE, 3) background in [0, 1]: coloured speckle, half of whose variance the channels have in common."""
    common = _speckle(rng)
    channels = [_speckle(rng) + common for _ in range(3)]
    return np.clip(GROUND + 0.06 / 2**0.5 * np.stack(channels, -1), 0, 1)


class _Make(NamedTuple):
    """What the objects of a scene have in common beside their class."""

    wavelength: float
    """Of the texture, in pixels."""
    angle: float
    """Of the texture, in radians."""
    polarity: int
    """1 or -1: light and dark change places."""
    hue: float
    """In turns."""


def _make(rng: np.random.Generator, label: int) -> _Make:
    """A make of a class; hues that are neighbours belong to textures that are not."""
    turn = rng.choice([-1, 1]) * np.pi / 4 if CLASSES[label] == "diagonal stripes" else 0.0
    hue = 3 * label % len(CLASSES) / len(CLASSES) + rng.uniform(-HUE_SPREAD, HUE_SPREAD)
    return _Make(rng.uniform(9, 14), turn + rng.uniform(-0.15, 0.15), rng.choice([-1, 1]), hue)


def _texture(rng: np.random.Generator, make: _Make, label: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The class's pattern in [-1, 1] over pixel coordinates centred on the object."""
    angle, frequency = make.angle, 2 * np.pi / make.wavelength
    u = (x * np.cos(angle) + y * np.sin(angle)) * frequency + rng.uniform(0, 2 * np.pi)
    v = (y * np.cos(angle) - x * np.sin(angle)) * frequency + rng.uniform(0, 2 * np.pi)
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
        pattern = np.sin(np.hypot(x, y) * frequency + rng.uniform(0, 2 * np.pi))
    elif name == "grid":
        pattern = (np.maximum(np.cos(u), np.cos(v)) - 0.6) * 2.5
    elif name == "plain":
        return np.full_like(x, make.polarity)
    elif name == "blobs":
        pattern = _smooth_noise(rng, 14)[: len(x), : x.shape[1]] * 2
    else:
        zigzag = np.abs((u / np.pi) % 2 - 1) * 2 * np.pi
        pattern = np.sin(v + zigzag)
    return np.clip(make.polarity * pattern * 1.5, -1, 1)


def _outline(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Whether each pixel lies in a random star-shaped outline about the origin."""
    radius, stretch, turn = rng.uniform(*RADIUS), rng.uniform(0.75, 1.33), rng.uniform(0, np.pi)
    a, b = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    a, b = a * np.sqrt(stretch), b / np.sqrt(stretch)
    theta, lobes = np.arctan2(b, a), rng.integers(2, 6)
    edge = radius * (1 + rng.uniform(0, 0.22) * np.cos(lobes * theta + rng.uniform(0, 2 * np.pi)))
    return np.hypot(a, b) < edge


def _colours(rng: np.random.Generator, hue: float) -> np.ndarray:
    """(2, 3) a pattern's two colours in [0, 1], one light and one dark, about a hue in turns."""
    hues = hue + rng.uniform(-0.04, 0.04, 2)
    wheel = 0.5 + 0.5 * np.cos(2 * np.pi * (hues[:, None] - np.array([0, 1 / 3, 2 / 3])))
    light, dark = 0.85 + 0.3 * (wheel[0] - 0.5), 0.15 + 0.3 * (wheel[1] - 0.5)
    return np.stack([dark, light])


def draw_scene(label: int, seed: int, index: int) -> Scene:
    """One scene; a function of its arguments alone."""
    rng = np.random.default_rng([seed, index, label])
    make = _make(rng, label)
    scene, taken = _ground(rng), np.zeros((SIDE, SIDE), bool)
    for _ in range(rng.integers(OBJECTS[0], OBJECTS[1] + 1)):
        taken |= _paint(rng, scene, taken, make, label)
    return Scene(_developed(rng, scene), np.where(taken, label + 1, 0).astype(np.uint8), label)


def _paint(rng: np.random.Generator, scene: np.ndarray, taken: np.ndarray, make: _Make, label: int) -> np.ndarray:
    """Draws an object where nothing else is, and returns where: (SIDE, SIDE) bool."""
    centre = rng.uniform(4, SIDE - 4, 2)
    near = tuple(slice(max(0, int(at) - REACH), min(SIDE, int(at) + REACH)) for at in centre)
    y, x = np.mgrid[near] - centre[:, None, None]
    inside = np.zeros_like(taken)
    inside[near] = _outline(rng, y, x) & ~taken[near]
    dark, light = _colours(rng, make.hue)
    part = (_texture(rng, make, label, y, x)[..., None] + 1) / 2
    scene[near] = np.where(inside[near][..., None], dark + (light - dark) * part, scene[near])
    return inside


def _developed(rng: np.random.Generator, scene: np.ndarray) -> np.ndarray:
    """(SIDE, SIDE, 3) in [0, 1] to uint8, with grain."""
    scene = scene + rng.normal(0, 0.02, (SIDE, SIDE, 1))
    return (np.clip(scene, 0, 1) * 255).round().astype(np.uint8)


class DenseScene(NamedTuple):
    """A drawn sample whose objects are of several classes."""

    image: np.ndarray
    """(96, 96, 3) uint8."""
    instances: np.ndarray
    """(n, 96, 96) bool, of each object what is seen of it."""
    labels: list[int]
    """(n) its class."""

    @property
    def label_map(self) -> np.ndarray:
        """(96, 96) uint8: 0 background, class + 1 on the objects."""
        classes = np.array(self.labels, np.uint8)[:, None, None] + np.uint8(1)
        return (self.instances * classes).sum(0, dtype=np.uint8)


def draw_dense_scene(seed: int, index: int) -> DenseScene:
    """A scene of 1 to 4 objects, each of a class of its own drawing; a function of its arguments alone.

    Of an object that others hide but for LEAST_SEEN pixels nothing is drawn.
    """
    rng = np.random.default_rng([seed, index])
    scene, taken = _ground(rng), np.zeros((SIDE, SIDE), bool)
    instances, labels = [], []
    for _ in range(rng.integers(1, OBJECTS[1] + 1)):
        label = int(rng.integers(len(CLASSES)))
        before = scene.copy()
        inside = _paint(rng, scene, taken, _make(rng, label), label)
        if inside.sum() < LEAST_SEEN:
            scene = before
            continue
        taken |= inside
        instances.append(inside)
        labels.append(label)
    return DenseScene(_developed(rng, scene), np.array(instances, bool).reshape(-1, SIDE, SIDE), labels)


SHIFTS = ("none", "other", "faint", "strong", "noisy", "negative", "lines")


def shifted_scenes(shift: str, classes: Sequence[int], per_class: int) -> Iterator[tuple[np.ndarray, int]]:
    """(96, 96, 3) uint8 scenes of some classes, the classes in turn, as a test set drawn another way would show them.

    Args:
        shift: ``none``; ``other`` scenes; ``faint``, ``strong``: less or more contrast; ``noisy``; ``negative``;
            ``lines``: dark edges of the grey scene on white.
        classes: class numbers.
        per_class: scenes of each.
    """
    for index in range(per_class * len(classes)):
        label = classes[index % len(classes)]
        seed = 10 + SHIFTS.index(shift)
        scene = draw_scene(label, seed, index).image.astype(float)
        if shift in ("faint", "strong"):
            scene = 128 + (scene - 128) * (0.5 if shift == "faint" else 1.6)
        elif shift == "noisy":
            scene += np.random.default_rng([seed, index]).normal(0, 25, scene.shape)
        elif shift == "negative":
            scene = 255 - scene
        elif shift == "lines":
            rows, columns = np.gradient(scene.mean(-1))
            scene = np.repeat(255 - 6 * np.hypot(rows, columns)[..., None], 3, -1)
        yield scene.clip(0, 255).round().astype(np.uint8), label
