"""Ranks of token-mixing matrices, drawn and put beside their bounds: ``python -m analysis.rank RUN [RUN ...]``.

Reads the results.json and results.npz that ``TokenMixingRanks`` left in each run's folder. Writes into each folder
matrices and spectra as PNG and PDF, and into the first one ranks.md, ranks.csv and ranks.html with all runs.
"""

import html
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis.pages import picture, save_figure
from analysis.renderers import renderer
from analysis.runs import Run, complete_run
from analysis.tables import Table, show_value, write_page
from analysis.targets import Target

COLOURS = {"attention": "#0072b2", "forward": "#d55e00", "backward": "#009e73", "both": "#000000"}  # Okabe & Ito
STYLES = {"attention": "-", "forward": "--", "backward": ":", "both": "-"}
COLUMNS = {
    "run": "run",
    "backbone": "backbone",
    "block": "block",
    "direction": "direction",
    "matrices": "matrices (images x heads)",
    "rank_max": "rank of M, largest",
    "rank_bound": "its bound",
    "effective_rank": "effective rank of M",
    "block_rank_max": "rank of a C x C block off the diagonal, largest",
    "paper": "the paper's bound of it",
    "block_rank_bound": "algebra's bound of it",
    "block_effective_rank_mean": "its effective rank, mean",
    "decay_block_rank_max": "rank of the decay mask's block",
    "bound_holds": "bounds hold",
    "residual_max": "error of Y = MX",
}


def read(folder: Path) -> Run:
    """A run of ``TokenMixingRanks``. ValueError where the folder holds none, or one of another evaluation."""
    return complete_run(folder, "run dinomamba validate with -c task/ranks.yaml first", "TokenMixingRanks")


def _paper(row: dict[str, Any]) -> str:
    """The bound of a block off the diagonal as the paper's lemmas state it."""
    if row["direction"] == "attention":
        return f"L = {row['tokens']}" if row["inner_size"] is None else f"d = {row['inner_size']}"
    return f"rank(L) · {row['inner_size']}, rank(L) ≫ 1"


def rows_of(run: Run) -> list[dict[str, Any]]:
    """A run's rows with the columns of COLUMNS."""
    found = []
    for row in run.rows:
        row = row | {
            "run": run.folder.name,
            "backbone": run.results["backbone"],
            "effective_rank": f"{row['effective_rank_mean']:.2f} ± {row['effective_rank_std']:.2f}",
            "paper": _paper(row),
        }
        found.append({key: row[key] for key in COLUMNS})
    return found


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it: two decimals, small errors as powers of ten."""
    value = row[column]
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.2f}"
    return show_value(row, column)


def draw_matrices(run: Run, path: Path) -> None:
    """log10 |M| of the first image's first head: a column per block, a row per direction, chunks outlined."""
    arrays, chunk = run.arrays, run.rows[0]["chunk"]
    names = [name.split("/")[1:] for name in arrays if name.startswith("matrix/")]
    blocks = list(dict.fromkeys(block for block, _ in names))
    directions = list(dict.fromkeys(direction for _, direction in names))
    shown = {}
    for block, direction in names:
        size_of = np.abs(arrays[f"matrix/{block}/{direction}"][0])
        shown[block, direction] = np.log10(np.where(size_of > 0, size_of / size_of.max(), np.nan))
    lowest = max(-6.0, min(float(np.nanmin(values)) for values in shown.values()))
    size = (2.4 * len(blocks) + 1.2, 2.6 * len(directions) + 0.3)
    fig, axes = plt.subplots(len(directions), len(blocks), figsize=size, squeeze=False, layout="constrained")
    for (direction, block), axis in zip(((d, b) for d in directions for b in blocks), axes.flat, strict=True):
        values = shown[block, direction]
        image = axis.imshow(np.maximum(values, lowest), cmap="viridis", vmin=lowest, vmax=0)
        for edge in range(chunk, len(values), chunk):
            axis.axhline(edge - 0.5, color="white", linewidth=0.6)
            axis.axvline(edge - 0.5, color="white", linewidth=0.6)
        axis.set_title(f"{block.replace('block', 'block ')}, {direction}", fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[-1, 0].set_xlabel("token read")
    axes[-1, 0].set_ylabel("token written")
    fig.colorbar(image, ax=axes, label=f"log10 |M| / max |M|, at least {lowest:.1f}", shrink=0.8)
    save_figure(fig, path)


def draw_spectra(run: Run, path: Path) -> None:
    """Mean singular values of M over the largest, a panel per block."""
    arrays = run.arrays
    names = [name.split("/")[1:] for name in arrays if name.startswith("spectrum/")]
    blocks = list(dict.fromkeys(block for block, _ in names))
    columns = min(4, len(blocks))
    count = -(-len(blocks) // columns)
    fig, axes = plt.subplots(
        count, columns, figsize=(3 * columns, 2.5 * count), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, block in zip(axes.flat, blocks, strict=False):
        for direction in (d for b, d in names if b == block):
            values = np.maximum(arrays[f"spectrum/{block}/{direction}"], 1e-16)
            axis.semilogy(
                np.arange(1, len(values) + 1), values, STYLES[direction], color=COLOURS[direction], label=direction
            )
        axis.set_title(block.replace("block", "block "), fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(blocks) :]:
        axis.set_visible(False)
    axes[-1, 0].set(xlabel="singular value number", ylabel="σ / largest σ")
    axes[0, 0].legend(fontsize=9)
    save_figure(fig, path)


NOTE = """M is the token-mixing matrix of Y = MX in float64, without the skip D. A block off the diagonal holds what a
chunk of C tokens reads from another. The paper bounds it for Mamba-2 by rank(L) times the state size n, with the decay
mask's rank(L) far above 1. For one decay a head the mask's block is an outer product, exp(a_i - a_j) = exp(a_i)
exp(-a_j), so its rank is exactly 1 (measured here in its own column), and the block's bound is n. Mamba still differs
from linear attention: M as a whole is triangular and of full rank, the two directions add up, decays weight the
spectrum, and n does not depend on the width of a head. The numerical rank counts singular values above the run's
tolerance (1e-10 unless set) of the largest; the effective rank is the exponential of the spectrum's entropy."""


def pictures(runs: list[Run]) -> str:
    """Each run's pictures, drawn into its folder, as HTML."""
    content = ""
    for run in runs:
        for name, text, drawing in (
            ("matrices", "matrices by block and direction", draw_matrices),
            ("spectra", "singular values by block", draw_spectra),
        ):
            path = run.folder / f"{name}.png"
            drawing(run, path)
            content += f"<h2>{html.escape(run.folder.name)}: {text}</h2>{picture(path, text)}"
    return content


def main(folders: list[Path], out: Path, title: str = "Ranks of token-mixing matrices") -> list[Path]:
    """Writes pictures into each run's folder and the tables, ranks.*, into ``out``; returns the tables."""
    runs = [read(folder) for folder in folders]
    table = Table(COLUMNS, [row for run in runs for row in rows_of(run)], show)
    return write_page(out / "ranks", title, NOTE, table, below=pictures(runs))


@renderer("ranks")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/ranks.md, .csv and .html, and pictures in each run's folder."""
    return main([run.folder for run in target.some(runs)], runs, target.title)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m analysis.rank RUN [RUN ...]")
    try:
        print(main([Path(argument) for argument in sys.argv[1:]], Path(sys.argv[1]))[-1])
    except ValueError as error:
        sys.exit(f"error: {error}")
