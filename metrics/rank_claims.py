"""What algebra proves, and what the paper says, of the ranks of a token-mixing matrix: held against what was measured."""

from collections.abc import Mapping
from typing import Any, NamedTuple

ALGEBRA, PAPER = "algebra", "paper"


class Claim(NamedTuple):
    """One statement about one rank."""

    of: str
    """Whose rank."""
    by: str
    """``algebra``, for what is proved (see :mod:`metrics.block_rank`), or ``paper``, for what the paper says besides."""
    says: str
    """The statement, with numbers."""
    least: int
    """The smallest rank measured; of the lower bound, rank(M) less the sum."""
    most: int
    holds: bool
    tight: bool
    """Whether a bound was reached."""


def rank_claims(row: Mapping[str, Any]) -> list[Claim]:
    """The claims on a row of ``TokenMixingRanks``; none of blocks that there are not.

    Of the paper: eq. 17 and the lemmas behind it, the blocks on the diagonal, and the rank of the decay mask. A bound
    by algebra that does not hold is a fault of the program, or numbers too small or large for float64.
    """
    found = [_at_most("M", row, "rank", row["rank_bound"], f"<= {row['rank_bound']}")]
    chunk, causal = row["chunk"], row["direction"] in ("forward", "backward", "causal")
    if row["lower_bound_slack_min"] is not None:
        least, most = row["lower_bound_slack_min"], row["lower_bound_slack_max"]
        says = ">= sum of the diagonal blocks' ranks"
        found.append(Claim("M", ALGEBRA, says, least, most, holds=least >= 0, tight=least == 0))
    found.append(_at_most("diagonal block", row, "diagonal_rank", row["diagonal_rank_bound"]))
    if causal:
        found.append(_exactly("diagonal block", row, "diagonal_rank", chunk))
    if row["block_rank_max"] is not None:
        found.append(_at_most("block off the diagonal", row, "block_rank", row["block_rank_bound"], _lemma(row)))
        if row["inner_size"] is None:
            found.append(_exactly("block off the diagonal", row, "block_rank", chunk))
    if row["decay_block_rank_max"] is not None:
        found.append(_at_most("the decay mask's block", row, "decay_block_rank", 1, "rank(L) = 1"))
        least, most = row["decay_block_rank_min"], row["decay_block_rank_max"]
        found.append(Claim("the decay mask's block", PAPER, "rank(L) >> 1", least, most, holds=least > 1, tight=False))
    if row["ragged_rank_max"] is not None:
        most, bound = row["ragged_rank_max"], row["ragged_rank_bound"]
        of = f"block off the diagonal of the last {row['ragged_tokens']} tokens"
        found.append(Claim(of, ALGEBRA, f"<= {bound}", most, most, holds=most <= bound, tight=most == bound))
    return found


def _lemma(row: Mapping[str, Any]) -> str:
    """The upper bound of a block off the diagonal in the paper's letters, with the numbers measured."""
    bound, inner = row["block_rank_bound"], row["inner_size"]
    if inner is None:
        return f"<= C = {bound}"
    if row["direction"] in ("attention", "causal"):
        return f"<= min(C, D_QK) = {bound}"
    mask = row["decay_block_rank_max"]
    return f"<= min(C, N) = {bound}" if mask is None else f"<= min(C, rank(L) N) = {min(row['chunk'], mask * inner)}"


def _at_most(of: str, row: Mapping[str, Any], key: str, bound: int, says: str | None = None) -> Claim:
    least, most = row[f"{key}_min"], row[f"{key}_max"]
    return Claim(of, ALGEBRA, says or f"<= {bound}", least, most, holds=most <= bound, tight=most == bound)


def _exactly(of: str, row: Mapping[str, Any], key: str, wanted: int) -> Claim:
    least, most = row[f"{key}_min"], row[f"{key}_max"]
    return Claim(of, PAPER, f"= C = {wanted}", least, most, holds=least == most == wanted, tight=most == wanted)
