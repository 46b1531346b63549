"""Tables for people: text where that is printed, HTML in a notebook."""

from __future__ import annotations

import html
import math
from typing import Any, Iterator, Sequence


def _text(value: Any) -> str:
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


class Table:
    """Rows with named columns, below lines of text. A sequence of dicts."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], text: str = ""):
        self.columns = list(columns)
        self.rows = [list(row) for row in rows]
        self.text = text

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(self.columns, self.rows[index]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __str__(self) -> str:
        lines = [self.columns] + [[_text(value) for value in row] for row in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join(([self.text.rstrip()] if self.text else []) + (table if self.rows else []))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        text = f"<pre>{html.escape(self.text.rstrip())}</pre>" if self.text else ""
        if not self.rows:
            return text
        body = "".join(row([_text(value) for value in line], "td") for line in self.rows)
        return f"{text}<table><thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"
