"""What pages and pictures share: one look for pages, one for colours, pictures as whole files."""

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common.files import write_text, written_aside

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, told apart with any colour vision."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 96rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #ddd; text-align: left; }
th { vertical-align: bottom; } td { vertical-align: top; }
.scroll { overflow-x: auto; } img { max-width: 100%; height: auto; }
p { max-width: 60rem; overflow-wrap: anywhere; }
"""


def picture(path: Path, text: str) -> str:
    """An ``img`` element that holds the PNG; ``text`` says what it shows."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def page(title: str, body: str) -> str:
    """A whole HTML page; ``body`` is HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def write_index(runs: Path, titles: Mapping[str, str]) -> None:
    """RUNS/index.html: links to the pages of the targets (name -> title) that are there, if any is."""
    there = {name: title for name, title in titles.items() if (runs / f"{name}.html").is_file()}
    links = "".join(f'<li><a href="{name}.html">{html.escape(title)}</a></li>' for name, title in there.items())
    if there:
        write_text(runs / "index.html", page("Tables and figures", f"<ul>{links}</ul>"))


def save_figure(fig: Any, base: Path, dpi: int = 110) -> list[Path]:
    """BASE.png and BASE.pdf, written aside and renamed; closes the figure."""
    paths = []
    for suffix in (".png", ".pdf"):
        paths.append(base.with_suffix(suffix))
        with written_aside(paths[-1]) as aside:
            fig.savefig(aside, dpi=dpi, format=suffix[1:])
    plt.close(fig)
    return paths
