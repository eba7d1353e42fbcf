"""What the HTML pages share: writing whole files, and pictures inside a page."""

import base64
import html
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes aside and renames, so that a reader sees the old file or the new one, whole."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)


def picture(path: Path, text: str) -> str:
    """An ``img`` element that holds the PNG; ``text`` says what it shows."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
