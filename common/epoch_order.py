"""What the batches of an epoch hang on: an epoch that was cut off goes on only where it is unchanged."""

from collections.abc import Mapping
from typing import Any

ORDER_KEYS = {
    "batch_size": "data.init_args.batch_size",
    "accumulate": "trainer.accumulate_grad_batches",
    "seed": "the seed (seed_everything, or data.init_args.seed)",
    "shuffle_window": "data.init_args.shuffle_window",
    "samples": "the number of training samples",
    "shards": "the number of training shards",
}
"""What the batches of an epoch hang on, and how people say it."""


def check_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError where an epoch that was begun under ``before`` would not go on under ``now``; see ORDER_KEYS."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    if changed:
        what = ", ".join(f"{ORDER_KEYS[name]} was {before[name]} and is {now[name]}" for name in changed)
        raise ValueError(f"the checkpoint lies inside an epoch: {what}; keep that, or resume from the end of an epoch")
