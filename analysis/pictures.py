"""A picture of a prediction: images beside their maps: ``python -m analysis.pictures RUN [--maps WORD …]``.

RUN is the folder of a ``dinomamba predict`` with ``-c task/binary_auc.yaml --model.pictures N``.
"""

import argparse
import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from common.files import written_aside

MOST_MAPS = 8


def read(folder: Path) -> tuple[list[str], np.ndarray, dict[str, np.ndarray]]:
    """Keys, images (P, H, W, 3) and maps (P, h, w) by name of the predicted images that were kept.

    Raises:
        ValueError: where there are none.
    """
    keys: list[str] = []
    images: list[np.ndarray] = []
    maps: dict[str, list[np.ndarray]] = {}
    paths = sorted((folder / "predictions").glob("*.npz"))
    for path in paths:
        with np.load(path) as part:
            if "images" not in part:
                continue
            count = len(part["images"])
            keys += part["key"][:count].tolist()
            images += list(part["images"])
            for name in (name for name in part.files if name.startswith("maps/")):
                maps.setdefault(name.removeprefix("maps/"), []).extend(part[name][:count])
    if not images or not maps:
        found = f"{len(paths)} files of predictions, none with images" if paths else "no predictions"
        raise ValueError(
            f"{folder} has {found}: run dinomamba predict -c base.yaml -c task/binary_auc.yaml … --model.pictures 8"
        )
    return keys, np.stack(images), {name: np.stack(values) for name, values in maps.items()}


def printable(name: str) -> str:
    """A file's name as fonts can show it: bytes that are no UTF-8, and what is not seen, as U+FFFD."""
    name = os.fsencode(name).decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name)


def draw(folder: Path, out: Path, words: list[str], count: int) -> list[str]:
    """Draws the first ``count`` images, each with the maps whose name holds one of ``words``; the names drawn."""
    keys, images, maps = read(folder)
    names = [name for name in maps if not words or any(word in name for word in words)]
    if not names:
        raise ValueError(f"no map's name holds {', '.join(words)}; there are {', '.join(maps)}")
    names, count = names[:MOST_MAPS], min(count, len(images))
    fig, axes = plt.subplots(
        count, 1 + len(names), figsize=(1.6 * (1 + len(names)), 1.7 * count + 0.4), squeeze=False, layout="constrained"
    )
    for row, key in zip(range(count), keys, strict=False):
        axes[row, 0].imshow(images[row])
        axes[row, 0].set_ylabel(printable(Path(key).name)[-18:], fontsize=6, parse_math=False)
        for axis, name in zip(axes[row, 1:], names, strict=True):
            axis.imshow(maps[name][row], cmap="viridis")  # each over its own range
    for axis, title in zip(axes[0], ["image", *names], strict=True):
        axis.set_title(title, fontsize=7)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    with written_aside(out) as aside:
        fig.savefig(aside, format=out.suffix.removeprefix(".") or "png", dpi=150)
    plt.close(fig)
    return names


def main(arguments: list[str] | None = None) -> None:
    """Images of a prediction beside their maps."""
    parser = argparse.ArgumentParser(prog="python -m analysis.pictures", description=main.__doc__)
    parser.add_argument("run", type=Path, help="folder of a prediction")
    parser.add_argument("--out", type=Path, help="picture, RUN/maps.png unless given; .png, .pdf or .svg")
    parser.add_argument("--maps", nargs="+", default=[], help="words, of which a map's name holds one")
    parser.add_argument("--count", type=int, default=8, help="images")
    args = parser.parse_args(arguments)
    out = args.out or args.run / "maps.png"
    names = draw(args.run, out, args.maps, args.count)
    print(f"{out}: {', '.join(names)}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
