"""Tables of ranks: by block, by direction, and what is said of them beside what was measured."""

from collections.abc import Mapping
from typing import Any

from analysis.runs import Run
from analysis.tables import show_value
from metrics.rank_claims import rank_claims

COLUMNS = {
    "run": "run",
    "backbone": "backbone",
    "block": "block",
    "direction": "direction",
    "tokens": "tokens L",
    "chunk": "C",
    "matrices": "matrices (images x heads)",
    "rank": "rank of M",
    "effective_rank": "effective rank of M",
    "diagonal_rank": "rank of a C x C block on the diagonal",
    "diagonal_effective_rank_mean": "its effective rank, mean",
    "block_rank": "rank of a C x C block off the diagonal",
    "paper": "the paper's bound of it",
    "block_rank_bound": "algebra's bound of it",
    "block_effective_rank_mean": "its effective rank, mean",
    "block_beyond_bound": "first singular value beyond the bound / largest",
    "decay_block_rank": "rank of the decay mask's block",
    "lower_bound_slack": "rank of M less its diagonal blocks' ranks",
    "ragged": "rank of blocks of the last L mod C tokens",
    "bound_holds": "bounds hold",
    "residual_max": "error of Y = MX",
}
SUMMARY = {
    "run": "run",
    "direction": "direction",
    "tokens": "tokens L",
    "matrices": "matrices (blocks x images x heads)",
    "rank": "rank of M",
    "effective_rank": "its effective rank",
    "diagonal_rank": "rank of a C x C block on the diagonal",
    "diagonal_effective_rank": "its effective rank",
    "block_rank": "rank of one off the diagonal",
    "block_rank_bound": "algebra's bound of it",
    "block_effective_rank": "its effective rank",
    "decay_block_rank": "rank(L) of one off the diagonal",
    "bound_holds": "bounds hold",
}
CLAIMS = {
    "run": "run",
    "direction": "direction",
    "of": "rank of",
    "by": "said by",
    "says": "what is said",
    "measured": "numerical rank, least to most",
    "tight": "reached",
    "holds": "holds",
    "matrices": "matrices (blocks x images x heads)",
}


def _paper(row: dict[str, Any]) -> str:
    """The bound of a block off the diagonal as the paper's lemmas state it."""
    if row["direction"] in ("attention", "causal"):
        return f"C = {row['chunk']}" if row["inner_size"] is None else f"D_QK = {row['inner_size']}"
    return f"rank(L) · {row['inner_size']}, rank(L) ≫ 1"


def spread(least: int | None, most: int | None) -> str | None:
    """Least to most; one number where they are equal."""
    return None if least is None else f"{least:,}" if least == most else f"{least:,} to {most:,}"


def rows_of(run: Run) -> list[dict[str, Any]]:
    """A run's rows with the columns of COLUMNS."""
    found = []
    for row in run.rows:
        row = row | {
            "run": run.folder.name,
            "backbone": run.results["backbone"],
            "effective_rank": f"{row['effective_rank_mean']:.2f} ± {row['effective_rank_std']:.2f}",
            "paper": _paper(row),
            "ragged": None
            if row["ragged_rank_max"] is None
            else f"{row['ragged_rank_max']} of {row['ragged_rank_bound']}",
        }
        for name in ("rank", "diagonal_rank", "block_rank", "decay_block_rank", "lower_bound_slack"):
            row[name] = spread(row[f"{name}_min"], row[f"{name}_max"])
        found.append({key: row[key] for key in COLUMNS})
    return found


def summary_of(run: Run) -> list[dict[str, Any]]:
    """A run's rows by direction, all blocks together, with the columns of SUMMARY: least to most, and means."""
    found = []
    for direction in dict.fromkeys(row["direction"] for row in run.rows):
        rows = [row for row in run.rows if row["direction"] == direction]
        one: dict[str, Any] = {key: rows[0][key] for key in ("direction", "tokens", "block_rank_bound")}
        for name in ("rank", "diagonal_rank", "block_rank", "decay_block_rank"):
            there = [row for row in rows if row[f"{name}_min"] is not None]
            ends = (min, "min"), (max, "max")
            one[name] = spread(*(end(row[f"{name}_{key}"] for row in there) for end, key in ends)) if there else None
        for name in ("effective_rank", "diagonal_effective_rank", "block_effective_rank"):
            means = [row[f"{name}_mean"] for row in rows if row[f"{name}_mean"] is not None]
            one[name] = sum(means) / len(means) if means else None
        one |= {"run": run.folder.name, "matrices": sum(row["matrices"] for row in rows)}
        found.append(one | {"bound_holds": all(row["bound_holds"] for row in rows)})
    return found


def claims_of(run: Run) -> list[dict[str, Any]]:
    """What is said of a run's ranks, each claim once for all its blocks, with the columns of CLAIMS."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in run.rows:
        for claim in rank_claims(row):
            key = row["direction"], claim.of, claim.by, claim.says
            empty = claim._asdict() | {"run": run.folder.name, "direction": row["direction"], "matrices": 0}
            one = found.setdefault(key, empty)
            one["least"], one["most"] = min(one["least"], claim.least), max(one["most"], claim.most)
            one["holds"], one["tight"] = one["holds"] and claim.holds, one["tight"] or claim.tight
            one["matrices"] += row["matrices"]
    return [one | {"measured": spread(one["least"], one["most"])} for one in found.values()]


def show(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it: two decimals, small errors as powers of ten, a dash where a bound was not reached."""
    value = row[column]
    if column == "tight":
        return "yes" if value else "–"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.2f}"
    return show_value(row, column)
