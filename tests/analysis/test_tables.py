"""The table writer, pages and the kinds of targets."""

import csv
import io

import pytest

from analysis import renderers, tables
from analysis.pages import write_index
from experiments import spec

ROWS = [{"a": 1234, "b": 0.5, "c": None, "more": 1}, {"a": None, "b": True, "d": "x < y"}]
TABLE = tables.Table({"a": "first", "b": "second", "c": "third", "d": "fourth"}, ROWS)


def test_one_table_three_ways(tmp_path):
    assert TABLE.cells() == [["1,234", "0.500", "–", "–"], ["–", "yes", "–", "x < y"]]
    filled = TABLE.filled()
    assert [*filled.columns] == ["a", "b", "d"]
    assert filled.to_markdown().splitlines() == [
        "| first | second | fourth |", "| --- | --- | --- |", "| 1,234 | 0.500 | – |", "| – | yes | x < y |",
    ]  # fmt: skip
    assert list(csv.DictReader(io.StringIO(filled.to_csv()))) == [
        {"a": "1234", "b": "0.5", "d": ""}, {"a": "", "b": "True", "d": "x < y"},
    ]  # fmt: skip
    assert "<td>x &lt; y</td>" in filled.to_html() and "<th>fourth</th>" in filled.to_html()
    paths = tables.write_page(tmp_path / "t", "A title", "a & b", TABLE, above="<i>up</i>", below="<i>down</i>")
    assert [path.name for path in paths] == ["t.md", "t.csv", "t.html"] and len(list(tmp_path.iterdir())) == 3
    text = paths[2].read_text()
    places = [text.index(part) for part in ("<h1>A title", "<i>up", "<p>a &amp; b", "<table>", "<i>down")]
    assert places == sorted(places)
    assert paths[0].read_text().startswith("# A title\n\na & b\n\n| first |")


def test_every_kind_is_known(tmp_path):
    assert {entry["kind"] for entry in spec.content()["targets"].values()} == set(renderers.kinds())
    target = spec.target("table1")
    with pytest.raises(
        ValueError, match=r"table1: kind='pie'; allowed: bars, claims, components_and_maps, demo, dense"
    ):
        renderers.draw(target.__class__(**{**vars(target), "kind": "pie"}), tmp_path)


def test_index(tmp_path):
    write_index(tmp_path, spec.titles())
    assert not list(tmp_path.iterdir())
    (tmp_path / "table5.html").touch()
    write_index(tmp_path, spec.titles())
    text = (tmp_path / "index.html").read_text()
    assert '<a href="table5.html">Table 5.' in text and text.count("href") == 1
