"""`Timeline`: what ran when, as a table says or as it was measured, drawn as text or as a picture.

Knows nothing of tensors and meshes.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ..base.argument_checks import file_to_write, optional


class Span(NamedTuple):
    """One entry of a schedule as it ran on one row: forward (F) or backward (B) of a microbatch."""

    row: int
    kind: str
    microbatch: int
    start: float
    end: float


class Timeline(NamedTuple):
    """Spans on named rows.

    >>> Timeline(("stage 0",), (Span(0, "F", 0, 0.0, 1.0), Span(0, "B", 0, 2.0, 4.0))).bubble
    0.25
    """

    rows: tuple[str, ...]
    spans: tuple[Span, ...]

    @property
    def wall(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self._start

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each row worked."""
        return tuple(sum(span.end - span.start for span in self.spans if span.row == row) for row in range(len(self.rows)))

    @property
    def bubble(self) -> float:
        """The share of the time of all rows in which they did not work."""
        return 1 - sum(self.busy) / (len(self.rows) * self.wall) if self.wall else 0.0

    @property
    def _start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    def draw(self, width: int = 96) -> str:
        """The rows as text, `width` characters for the whole time; microbatches by their last digit, backwards between bars.

        >>> spans = (Span(0, "F", 0, 0, 1), Span(1, "F", 0, 1, 2), Span(1, "B", 0, 2, 4), Span(0, "B", 0, 4, 6))
        >>> print(Timeline(("first", "last"), spans).draw(24))
        first  0000            ▒▒▒0▒▒▒▒
        last       0000▒▒▒0▒▒▒▒
        """
        margin = max(map(len, self.rows), default=0) + 2
        lines = [[" "] * width for _ in self.rows]
        for span in self.spans:
            first, last = (round((at - self._start) / (self.wall or 1) * width) for at in (span.start, span.end))
            digit, size = str(span.microbatch % 10), last - first
            filled = digit * size if span.kind == "F" else digit.center(size, "▒") if size else ""
            lines[span.row][first:last] = list(filled)
        shown = zip(self.rows, lines, strict=True)
        return "\n".join(f"{name:<{margin}}{''.join(line)}".rstrip() for name, line in shown)

    def svg(self, path: str | os.PathLike[str] | None = None, width: int = 960) -> str:
        """The rows as a picture: forwards in blue, backwards in green; written to `path` if one is given.

        >>> Timeline(("stage 0",), (Span(0, "F", 0, 0.0, 1.0),)).svg().count("<rect")
        1
        """
        target = optional(file_to_write, path, "svg: path")
        margin, height = 8 + 7 * max(map(len, self.rows), default=0), 24
        scale = (width - margin) / (self.wall or 1)
        parts = [
            f'<text x="4" y="{row * height + 16}">{name.replace("&", "&amp;").replace("<", "&lt;")}</text>'
            for row, name in enumerate(self.rows)
        ]
        for row, kind, microbatch, start, end in self.spans:
            left, size, top = margin + (start - self._start) * scale, (end - start) * scale, row * height
            fill = {"F": "#9ec5fe", "B": "#a3cfbb"}[kind]
            parts.append(f'<rect x="{left:.1f}" y="{top + 2}" width="{size:.1f}" height="20" fill="{fill}" stroke="#495057"/>')
            if size >= 12:
                parts.append(f'<text x="{left + size / 2:.1f}" y="{top + 16}" text-anchor="middle">{microbatch}</text>')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{len(self.rows) * height + 4}"'
        text = "\n".join([f'{head} font-family="monospace" font-size="11">', *parts, "</svg>", ""])
        if target is not None:
            target.write_text(text)
        return text
