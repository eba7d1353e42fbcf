"""The token-mixing matrix M in blocks, of small random mixers of ours, with the rank of each block as measured.

Shapes: L = 9 tokens in chunks of C = 3; an inner size (a head's width, or the state's) of 2, below C: bounds show.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from analysis.figure_pages import write_figure
from analysis.renderers import renderer
from analysis.tables import Table
from analysis.targets import Target
from backbones.mixers import BidirectionalMamba2, LinearAttention, SoftmaxAttention
from metrics import chunks, numerical_rank, rank_bound, singular_values

LENGTH, CHUNK, INNER, WIDTH = 9, 3, 2, 8
NOTE = f"""M of Y = MX of one head of a softmax attention, a linear attention and a Mamba-2 mixer with random weights,
over {LENGTH} random tokens, cut into chunks of {CHUNK}; a head's width and the state's size are {INNER}. Above M as the
mixer uses it in a visual model, with Mamba's two directions averaged; below under the causal mask, which for Mamba is
its forward scan. The number in a block is its rank as measured in float64. Darker is larger in log10 |M|,
grey is zero."""
COLUMNS = {
    "mixer": "mixer",
    "form": "form",
    "where": "blocks",
    "count": "how many",
    "paper": "paper: rank",
    "ours": "ours: rank",
    "difference": "difference",
    "bound": "algebra's bound",
    "decay": "rank of the decay mask's block",
}


class Panel(NamedTuple):
    """One matrix."""

    mixer: str
    form: str
    matrix: Tensor
    """(L, L) in float64."""
    width: int | None
    """The inner size that bounds blocks off the diagonal; None for softmax attention."""
    decay: Tensor | None = None
    """(L, L) the decay mask of a scan in one direction."""


def panels(seed: int = 0) -> list[Panel]:
    """Softmax, linear and Mamba-2: as used, then causal."""
    torch.manual_seed(seed)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    softmax, linear = SoftmaxAttention(WIDTH, WIDTH // INNER).double(), LinearAttention(WIDTH, WIDTH // INNER).double()
    mamba = BidirectionalMamba2(
        WIDTH, d_state=INNER, headdim=WIDTH, expand=1, dt_min=0.1, dt_max=1, backend="torch"
    ).double()
    with torch.no_grad():
        for mixer in (softmax, linear):
            mixer.qkv.weight.normal_(std=0.5)
        both = mamba.decompose(x)
        attention = {name: mixer.mixing(x)[0, 0] for name, mixer in (("softmax", softmax), ("linear", linear))}
        mean = torch.stack([part.matrix[0, 0] for part in both]).mean(0)
        assert both[0].log_decay is not None
        log_decay = both[0].log_decay[0, 0]
        decay = (log_decay[:, None] - log_decay).tril().exp().tril()
    return [
        Panel("softmax attention", "as used", attention["softmax"], None),
        Panel("linear attention", "as used", attention["linear"], INNER),
        Panel("Mamba-2", "both directions", mean, INNER),
        Panel("softmax attention", "causal mask", attention["softmax"].tril(), None),
        Panel("linear attention", "causal mask", attention["linear"].tril(), INNER),
        Panel("Mamba-2", "forward scan", both[0].matrix[0, 0], INNER, decay),
    ]


def _where(row: int, column: int) -> str:
    return "diagonal" if row == column else "below the diagonal" if row > column else "above the diagonal"


def _paper(panel: Panel, where: str) -> tuple[str, int | None]:
    """What the paper says of a block's rank, and the number where it gives one."""
    if where == "diagonal":
        return (f"C = {CHUNK}", CHUNK) if panel.form in ("causal mask", "forward scan") else ("–", None)
    if panel.width is None:
        return f"C = {CHUNK}", CHUNK
    return (f"≤ rank(L) · {INNER}, rank(L) > 1", None) if panel.mixer == "Mamba-2" else (f"≤ {INNER}", INNER)


def blocks(matrix: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The blocks (C, C) of M (L, L), which they divide, row by row: row, column and block."""
    whole, _ = chunks(matrix.shape[-1], CHUNK)
    for row, rows in enumerate(whole):
        for column, columns in enumerate(whole):
            yield row, column, matrix[rows, columns]


def measure(panel: Panel) -> list[dict[str, Any]]:
    """Rows of COLUMNS: the ranks of the blocks on, below and above the diagonal; blocks of zeros are left out."""
    found: dict[str, list[int]] = {}
    for row, column, block in blocks(panel.matrix):
        if block.abs().max() > 0:
            found.setdefault(_where(row, column), []).append(int(numerical_rank(singular_values(block))))
    rows = []
    for where, ranks in found.items():
        said, number = _paper(panel, where)
        bound = CHUNK if where == "diagonal" and panel.form != "as used" else rank_bound((CHUNK, CHUNK), panel.width)
        decays = [] if panel.decay is None or where == "diagonal" else [
            int(numerical_rank(singular_values(block))) for row, column, block in blocks(panel.decay)
            if _where(row, column) == where
        ]  # fmt: skip
        same = len(set(ranks)) == 1
        rows.append(
            {"mixer": panel.mixer, "form": panel.form, "where": where, "count": len(ranks), "paper": said,
             "ours": f"{ranks[0]}" if same else f"{min(ranks)} to {max(ranks)}",
             "difference": None if number is None else max(ranks) - number, "bound": bound,
             "decay": max(decays) if decays else None}
        )  # fmt: skip
    return rows


def draw_panel(axis: Any, panel: Panel) -> None:
    """log10 |M|, blocks outlined, the rank of each in its middle."""
    size = panel.matrix.abs().numpy()
    values = np.log10(np.where(size > 0, size / size.max(), np.nan))
    axis.imshow(values, cmap=plt.get_cmap("Blues").with_extremes(bad="#d9d9d9"), vmin=-3, vmax=0.6)
    for edge in range(0, LENGTH + 1, CHUNK):
        axis.plot([edge - 0.5] * 2, [-0.5, LENGTH - 0.5], color="#333", linewidth=1.2)
        axis.plot([-0.5, LENGTH - 0.5], [edge - 0.5] * 2, color="#333", linewidth=1.2)
    for row, column, block in blocks(panel.matrix):
        if block.abs().max() > 0:
            middle = (CHUNK - 1) / 2
            rank = int(numerical_rank(singular_values(block)))
            axis.text(
                column * CHUNK + middle, row * CHUNK + middle, str(rank),
                ha="center", va="center", fontsize=13, color="#d55e00", weight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "boxstyle": "circle,pad=0.15"},
            )  # fmt: skip
    axis.set(xticks=[], yticks=[], xlim=(-0.6, LENGTH - 0.4), ylim=(LENGTH - 0.4, -0.6))
    axis.set_title(f"{panel.mixer}, {panel.form}", fontsize=10)


@renderer("mixing_drawing")
def draw(target: Target, runs: Path) -> list[Path]:
    """RUNS/TARGET.*: six matrices with the ranks of their blocks."""
    shown = panels()
    fig, axes = plt.subplots(2, 3, figsize=(9, 6.4), layout="constrained")
    for axis, panel in zip(axes.flat, shown, strict=True):
        draw_panel(axis, panel)
    axes[0, 0].set_ylabel("token written")
    axes[1, 0].set_ylabel("token written")
    for axis in axes[1]:
        axis.set_xlabel("token read")
    table = Table(COLUMNS, [row for panel in shown for row in measure(panel)])
    return write_figure(target, runs, fig, NOTE, table)
