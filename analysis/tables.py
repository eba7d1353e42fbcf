"""The one writer of tables: columns and rows as Markdown, CSV, HTML, and as a page with its text and pictures."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.pages import page
from common.files import to_csv, write_text


def show_value(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it: three decimals, thousands apart, a dash for nothing."""
    value = row.get(column)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Args:
        columns: key in a row -> heading.
        rows: may hold more than the columns, and lack some of them.
        show: a row's cell as people read it. CSV has the values as they are.
    """

    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    show: Callable[[Mapping[str, Any], str], str] = show_value

    def filled(self) -> "Table":
        """The same without the columns that no row fills."""
        columns = {k: v for k, v in self.columns.items() if any(row.get(k) is not None for row in self.rows)}
        return Table(columns, self.rows, self.show)

    def cells(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[self.show(row, column) for column in self.columns] for row in self.rows]

    def to_markdown(self) -> str:
        """A table of GitHub's Markdown."""
        lines = [self.columns.values(), ["---"] * len(self.columns), *self.cells()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_csv(self) -> str:
        """Keys as the header, values as they are."""
        return to_csv(self.rows, [*self.columns])

    def to_html(self) -> str:
        """A table of plain text that scrolls where it is too wide."""
        head = "".join(f"<th>{html.escape(label)}</th>" for label in self.columns.values())
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self.cells())
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Section:
    """A part of a page below its numbers.

    Args:
        title: its heading.
        lines: paragraphs of plain text.
        table: numbers below them.
    """

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None

    def to_markdown(self) -> str:
        """Heading, a list of the lines, the table."""
        parts = [f"## {self.title}", "\n".join(f"- {line}" for line in self.lines)]
        parts += [self.table.to_markdown()] if self.table is not None else []
        return "\n\n".join(filter(None, parts))

    def to_html(self) -> str:
        """The same as HTML."""
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines)
        return f"<h2>{html.escape(self.title)}</h2>{lines}{'' if self.table is None else self.table.to_html()}"


def write_page(
    base: Path, title: str, text: str, table: Table, above: str = "", below: str = "",
    sections: Sequence[Section] = (), suffixes: Iterable[str] = (".md", ".csv", ".html"),
) -> list[Path]:  # fmt: skip
    """BASE.md, BASE.csv and BASE.html, a page that needs no other file.

    Args:
        base: the files' path without a suffix.
        title: the heading.
        text: what the reader must know of the numbers, in plain text.
        table: the numbers.
        above, below: HTML before the text and after the table of the page, such as pictures.
        sections: what else is to be read, after the numbers.
        suffixes: which of the three are wanted.

    Returns:
        The files written.
    """
    content = {
        ".md": lambda: (
            "\n\n".join([f"# {title}", text, table.to_markdown(), *(s.to_markdown() for s in sections)]) + "\n"
        ),
        ".csv": table.to_csv,
        ".html": lambda: page(
            title,
            f"{above}<p>{html.escape(text)}</p>{table.to_html()}{below}{''.join(s.to_html() for s in sections)}",
        ),
    }
    paths = []
    for suffix in suffixes:
        paths.append(base.with_suffix(suffix))
        write_text(paths[-1], content[suffix]())
    return paths
