"""A DINO step and a forward pass of the demo's Vim against the size N of its state: time, and memory at its peak.

``--out FILE`` writes the numbers as JSON too, as ``make states`` does for its page.
"""

import argparse
from pathlib import Path

from demo_cost import HEADER, Point, cells, keep, measure, note, train_one
from measuring import report

POINTS = [Point("vim_demo", "Vim", n, {"d_state": n}) for n in (16, 32, 64, 128, 256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON with the same numbers")
    parser.add_argument("--one", type=int, help="train the point of this number alone, and tell the peak of memory")
    given = parser.parse_args()
    if given.one is not None:
        train_one(POINTS[given.one])
        return
    rows = measure(POINTS, __file__)
    report("state_size", ["N", *HEADER], [[str(row["x"]), *cells(row)] for row in rows], f"vim_demo, {note()}")
    if given.out:
        keep(given.out, rows)


if __name__ == "__main__":
    main()
