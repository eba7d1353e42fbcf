"""Ranks of token-mixing matrices, drawn and put beside their bounds: ``python -m analysis.rank RUN [RUN ...]``.

Reads the results.json and results.npz that ``TokenMixingRanks`` left in each run's folder. Writes into each folder
matrices and spectra as PNG and PDF, and into the first one ranks.md, ranks.csv and ranks.html with all runs, and
ranks-summary.md and .csv with all blocks together, and ranks-claims.md and .csv with what algebra and the paper say.
"""

import html
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from analysis.pages import picture, save_figure
from analysis.rank_tables import CLAIMS, COLUMNS, SUMMARY, claims_of, rows_of, show, summary_of
from analysis.renderers import renderer
from analysis.runs import Run, complete_run
from analysis.tables import Table, write_page
from analysis.targets import Target

COLOURS = {
    "attention": "#0072b2",
    "causal": "#cc79a7",
    "forward": "#d55e00",
    "backward": "#009e73",
    "both": "#000000",
}  # Okabe & Ito
STYLES = {"attention": "-", "causal": "--", "forward": "--", "backward": ":", "both": "-"}
WANTED = ("diagonal_rank_min", "lower_bound_slack_min", "diagonal_nonzero_min", "ragged_tokens")
"""What earlier versions did not measure."""


def read(folder: Path) -> Run:
    """A run of ``TokenMixingRanks``. ValueError where the folder holds none, or one of another evaluation."""
    run = complete_run(folder, "run dinomamba validate with -c task/ranks.yaml first", "TokenMixingRanks")
    if lacking := [key for key in WANTED if any(key not in row for row in run.rows)]:
        raise ValueError(f"{folder / 'results.json'} is of an earlier version, without {lacking[0]}: run it again")
    return run


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


NOTE = """M is the token-mixing matrix of Y = MX in float64, without the skip D; `causal` is the matrix of attention
times the mask of ones at and below the diagonal (rows not normalised again, which would change no rank). A block off
the diagonal holds what a chunk of C tokens reads from another; the last L mod C tokens make smaller ones, which count
by themselves. The paper bounds it for Mamba-2 by rank(L) times the state size N, with the decay mask's rank(L) far
above 1. For one decay a head the mask's block is an outer product, exp(a_i - a_j) = exp(a_i) exp(-a_j), so its rank
is exactly 1 (measured here by itself), and the block's bound is N. Mamba still differs from linear attention: M as a
whole is triangular and of full rank, the two directions add up, decays weight the spectrum, and N does not depend on
the width of a head. The numerical rank counts singular values above max(R, S) · eps of the largest, eps being
float64's, for R x S, unless the run has a tolerance; the effective rank is the exponential of the spectrum's entropy.
A triangular matrix without a zero on its diagonal has full rank, whatever its numerical rank is, which falls short
where it is badly conditioned."""


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


def main(
    folders: list[Path], out: Path, title: str = "Ranks of token-mixing matrices", name: str = "ranks"
) -> list[Path]:
    """Pictures go into each run's folder; NAME.*, NAME-summary.* and NAME-claims.* into ``out``, which are returned."""
    runs = [read(folder) for folder in folders]
    table = Table(COLUMNS, [row for run in runs for row in rows_of(run)], show).filled()
    claims = Table(CLAIMS, [claim for run in runs for claim in claims_of(run)], show)
    summary = Table(SUMMARY, [line for run in runs for line in summary_of(run)], show).filled()
    above = f"{summary.to_html()}<h2>What is said, and what was measured</h2>{claims.to_html()}<h2>By block</h2>"
    paths = write_page(out / name, title, NOTE, table, above=above, below=pictures(runs))
    for part, content in (("summary", summary), ("claims", claims)):
        paths += write_page(out / f"{name}-{part}", title, NOTE, content, suffixes=(".md", ".csv"))
    return paths


@renderer("ranks")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.md, .csv and .html, the same with -summary and -claims, and pictures in each run's folder."""
    return main([run.folder for run in target.some(runs)], runs, target.title, target.name)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m analysis.rank RUN [RUN ...]")
    try:
        print(main([Path(argument) for argument in sys.argv[1:]], Path(sys.argv[1]))[2])
    except ValueError as error:
        sys.exit(f"error: {error}")
