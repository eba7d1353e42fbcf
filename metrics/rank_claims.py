"""What algebra proves, and what the paper says, of the ranks of token-mixing matrices, beside what was measured."""

from collections.abc import Mapping
from typing import Any, NamedTuple

ALGEBRA, PAPER, NUMERICAL = "algebra", "paper", "algebra, of numerical ranks"


class Claim(NamedTuple):
    """One statement about one rank."""

    of: str
    """Whose rank."""
    by: str
    """``algebra``: proved, see :mod:`metrics.block_rank`; ``algebra, of numerical ranks``: proved of ranks, and of
    numerical ones as far as conditioning allows; ``paper``: what the paper says besides."""
    says: str
    """The statement, with numbers."""
    least: int
    """The smallest numerical rank measured; of the lower bound, rank(M) less the sum."""
    most: int
    holds: bool
    """Of what is counted exactly, such as zeros of a diagonal, whatever the numerical rank is."""
    tight: bool
    """Whether the bound was reached."""


def rank_claims(row: Mapping[str, Any]) -> list[Claim]:
    """The claims on a row of ``TokenMixingRanks``; none of blocks that there are not.

    The upper bounds are eq. 17 and the lemmas behind it; the third lemma is the lower bound; of the paper besides: full
    rank of the blocks on the diagonal and of softmax's off it, and the rank of the decay mask. A bound by algebra that
    does not hold is a fault of the program.
    """
    found = [_at_most("M", row, "rank", row["rank_bound"])]
    full = row["diagonal_nonzero_min"] == row["tokens"]
    if row["lower_bound_slack_min"] is not None:
        least, most = row["lower_bound_slack_min"], row["lower_bound_slack_max"]
        if full:
            says = f"{row['tokens']} = sum of the diagonal blocks' ranks, as no entry of the diagonal is zero"
            found.append(Claim("M", ALGEBRA, says, row["rank_min"], row["rank_max"], holds=True, tight=True))
        says = "less the sum of the diagonal blocks' ranks >= 0"
        found.append(Claim("M", NUMERICAL, says, least, most, holds=least >= 0, tight=least == 0))
    found.append(_at_most("diagonal block", row, "diagonal_rank", row["diagonal_rank_bound"]))
    if row["lower_bound_slack_min"] is not None:
        claim = _exactly("diagonal block", row, "diagonal_rank")
        if full:
            claim = claim._replace(says=f"{claim.says}, as no entry of the diagonal is zero", holds=True)
        found.append(claim)
    if row["block_rank_max"] is not None:
        found.append(_at_most("block off the diagonal", row, "block_rank", row["block_rank_bound"], _lemma(row)))
        if row["inner_size"] is None:
            found.append(_exactly("block off the diagonal", row, "block_rank"))
    if row["decay_block_rank_max"] is not None:
        found.append(_at_most("decay mask's block", row, "decay_block_rank", 1, "rank(L) = 1"))
        least, most = row["decay_block_rank_min"], row["decay_block_rank_max"]
        found.append(Claim("decay mask's block", PAPER, "rank(L) >> 1", least, most, holds=least > 1, tight=False))
    if row["ragged_rank_max"] is not None:
        most, bound = row["ragged_rank_max"], row["ragged_rank_bound"]
        of = f"largest block off the diagonal with the last {row['ragged_tokens']}"
        found.append(Claim(of, ALGEBRA, f"<= {bound}", most, most, holds=most <= bound, tight=most == bound))
    return found


def _lemma(row: Mapping[str, Any]) -> str:
    """The upper bound of a block off the diagonal in the paper's letters."""
    bound = row["block_rank_bound"]
    if row["inner_size"] is None:
        return f"<= C = {bound}"
    if row["direction"] in ("attention", "causal"):
        return f"<= min(C, D_QK) = {bound}"
    return f"<= min(C, {'' if row['decay_block_rank_max'] is None else 'rank(L) '}N) = {bound}"


def _at_most(of: str, row: Mapping[str, Any], key: str, bound: int, says: str | None = None) -> Claim:
    least, most = row[f"{key}_min"], row[f"{key}_max"]
    return Claim(of, ALGEBRA, says or f"<= {bound}", least, most, holds=most <= bound, tight=most == bound)


def _exactly(of: str, row: Mapping[str, Any], key: str) -> Claim:
    least, most, wanted = row[f"{key}_min"], row[f"{key}_max"], row["chunk"]
    return Claim(of, PAPER, f"= C = {wanted}", least, most, holds=least == most == wanted, tight=most == wanted)
