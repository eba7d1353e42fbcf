"""The demo over several seeds: ``python -m analysis.demo_seeds RUN RUN … [--out FILE.md]``.

Reads RUN/report.json of each, as ``make demo`` leaves it; prints a table in Markdown with a line a seed, and what
pretraining brought: the mean over seeds with its interval by Student's t, and the least and most.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.runs import read_json
from analysis.tables import Table
from common.files import write_text
from metrics.effects import effect

GAINS = {
    "linear_top1": ("linear probe, top-1 %", 1),
    "knn_top1": ("k-NN, top-1 %", 1),
    "auc_of_mean_normalized": ("Binary-AUC, max(m, 1−m)", 3),
}
"""Score -> heading, and digits after the point."""
COLUMNS = {"seed": "seed"} | {key: heading for key, (heading, _) in GAINS.items()}
COLUMNS |= {"sign": "m", "shuffled": "shuffled", "position": "position alone", "seconds": "stages, s"}


def line(report: dict[str, Any]) -> dict[str, Any]:
    """A seed's scores before → after, and its controls."""
    before, after = report["untrained"], report["pretrained"]
    cells = {key: f"{before[key]:.{digits}f} → {after[key]:.{digits}f}" for key, (_, digits) in GAINS.items()}
    cells |= {"seed": report["seed"], "sign": after["auc"], "seconds": round(report["wall_seconds"])}
    return cells | {"shuffled": report["shuffled_auc"], "position": report["position_auc"]}


def gains(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a score: by how much the pretrained model is above the untrained one, over the seeds."""
    rows = []
    for key, (heading, digits) in GAINS.items():
        after, before = ([report[state][key] for report in reports] for state in ("pretrained", "untrained"))
        each = sorted(a - b for a, b in zip(after, before, strict=True))
        found = effect(after, before, paired=True)
        show = f"+.{digits}f"
        rows.append(
            {
                "score": heading,
                "mean": f"{found.difference:{show}}",
                "interval": f"{found.low:{show}} to {found.high:{show}}",
                "least": f"{each[0]:{show}}",
                "most": f"{each[-1]:{show}}",
                "better": f"{sum(gain > 0 for gain in each)} of {len(each)}",
            }
        )
    return rows


def to_markdown(reports: Sequence[dict[str, Any]]) -> str:
    """Both tables."""
    reports = sorted(reports, key=lambda report: report["seed"])
    heading = {"score": "pretrained less untrained", "mean": "mean", "interval": "95 % interval of the mean"}
    heading |= {"least": "least", "most": "most", "better": "seeds above"}
    tables = Table(COLUMNS, [line(report) for report in reports]), Table(heading, gains(reports))
    return "\n\n".join(table.to_markdown() for table in tables)


def main(args: Sequence[str]) -> None:
    """See the module's first lines. ValueError where a run has no report."""
    parser = argparse.ArgumentParser(prog="python -m analysis.demo_seeds", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a demo, such as runs/demo-1")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    given = parser.parse_args(args)
    text = to_markdown([read_json(run / "report.json", "run make demo, which makes it") for run in given.runs])
    print(text)
    if given.out:
        write_text(given.out, text + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
