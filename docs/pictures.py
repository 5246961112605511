"""Draws docs/pictures/*.svg: the folders of the package, and what happens to an eager, a captured and a compiled call.

`python docs/pictures.py` writes them; `make docs` runs it, and a test compares what is committed with what is drawn.
"""

from html import escape
from itertools import pairwise
from pathlib import Path

INK, PALE, LINE = "#1f2937", "#64748b", "#94a3b8"
BLUE, GREEN, YELLOW, RED, GREY, WHITE = "#dbeafe", "#dcfce7", "#fef3c7", "#fee2e2", "#f1f5f9", "#ffffff"


class Picture:
    """An SVG on a white card, so that it reads on light and on dark pages."""

    def __init__(self, width, height, title):
        self.size, self.title, self.parts = (width, height), title, []

    def text(self, at, words, size=11.5, weight=400, anchor="middle"):
        x, y = at
        color = INK if weight > 400 else PALE
        style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>')

    def box(self, at, size, lines, fill=WHITE, dashed=False):
        """A rectangle with a title and smaller lines below it."""
        (x, y), (w, h) = at, size
        stroke = f'stroke="{LINE}"' + (' stroke-dasharray="5 4"' if dashed else "")
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" {stroke}/>')
        top = y + h / 2 - 8 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            self.text((x + w / 2, top + 16 * i), line, *((14, 600) if i == 0 else ()))

    def arrow(self, points, words="", at=None):
        """A line through points with a head at its end."""
        path = " ".join(f"{'M' if i == 0 else 'L'}{x} {y}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{path}" fill="none" stroke="{PALE}" stroke-width="1.6" marker-end="url(#head)"/>')
        if words:
            self.text(at, words)

    def svg(self):
        w, h = self.size
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        head += f'<path d="M0 0L8 4L0 8z" fill="{PALE}"/></marker>'
        font = "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" {font}>\n'
            f"<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{w}" height="{h}" rx="10" fill="{WHITE}"/>\n{body}\n</svg>\n'
        )


#: Rows from what users call down to torch; in a row, a folder imports only from those on its left and from the rows below.
FOLDERS = [
    (
        YELLOW,
        [
            ("programs", "capture, passes,", "compile"),
            ("remat", "recompute instead", "of keeping"),
            ("pipeline", "stages, schedules,", "timelines"),
            ("package", "export, load,", "no tracing"),
            ("verify", "proof of rules,", "operator sweeps"),
        ],
    ),
    (GREEN, [("rules", "what every operator allows: one sentence or function each, one file a family", "")]),
    (
        GREEN,
        [("tensor", "the DTensor subclass; one operator call", "from key to result"), ("p2p", "messages that", "users write")],
    ),
    (
        BLUE,
        [
            ("redistribution", "runs plans on", "local tensors"),
            ("random", "numbers by global", "index"),
            ("kernels", "local operators", "that torch lacks"),
        ],
    ),
    (
        RED,
        [
            (
                "comm",
                "the transport, and the worlds behind it: process groups, simulated ranks",
                "comm/watch: logs and debug mode",
            )
        ],
    ),
    (
        BLUE,
        [
            ("layouts", "meshes, placements, layouts:", "frozen values"),
            ("planning", "cost, search, proof:", "layouts in, steps out"),
            ("propagation", "rule notation, table, decide:", "layouts in, layouts out"),
        ],
    ),
    (
        GREY,
        [
            ("_torch", "every private name of torch,", "every patch, by version"),
            ("base", "argument checks, caches,", "settings, process groups"),
        ],
    ),
]


def architecture():
    """The folders of the package as layers."""
    width, left, row, gap = 980, 60, 62, 14
    picture = Picture(width, 30 + len(FOLDERS) * (row + gap) + 14, "The folders of the package: imports go down and left only")
    for i, (fill, folders) in enumerate(FOLDERS):
        y, each = 22 + i * (row + gap), (width - left - 20 - gap * (len(folders) - 1)) / len(folders)
        for j, (name, *words) in enumerate(folders):
            picture.box((round(left + j * (each + gap), 1), y), (round(each, 1), row), [name, *filter(None, words)], fill)
    bottom = 22 + len(FOLDERS) * (row + gap) - gap
    picture.arrow([(34, 22), (34, bottom)])
    picture.parts.append(f'<g transform="translate(24 {bottom / 2}) rotate(-90)">')
    picture.text((0, 0), "imports go down, and left within a row", 12)
    picture.parts.append("</g>")
    return picture.svg()


def dataflow():
    """One call: eager, captured, compiled."""
    picture = Picture(980, 470, "What happens to an eager, a captured and a compiled call")
    top, mid, h = 62, 222, 58
    for y, words in ((top, "eager"), (mid, "captured"), (mid + 82, "compiled")):
        picture.text((16, y + h / 2 + 5), words, 15, 700, anchor="start")
    # the eager lane
    picture.box((320, top - 40), (300, h + 62), [], GREY, dashed=True)
    picture.text((470, top - 22), "pure and cached: no data, no rank")
    boxes = [
        (110, 90, ["y = x @ w", "DTensors"], WHITE),
        (216, 90, ["dispatch", "one key,", "one look-up"], GREEN),
        (334, 130, ["decide", "rule sentence", "→ layouts"], GREEN),
        (478, 130, ["plan", "have → want,", "shortest path"], GREEN),
        (634, 90, ["run steps", "collectives"], RED),
        (738, 122, ["local operator", "plain tensors"], BLUE),
        (874, 88, ["wrap", "its layout"], GREEN),
    ]
    for x, w, lines, fill in boxes:
        picture.box((x, top), (w, h), lines, fill)
    for (x, w, *_), (to, *_) in pairwise(boxes):
        picture.arrow([(x + w, top + h / 2), (to - 1, top + h / 2)])
    picture.arrow(
        [(261, top + h), (261, top + h + 42), (799, top + h + 42), (799, top + h + 1)],
        "a known call: nothing moves, nothing is decided",
        (527, top + h + 37),
    )
    # the two others
    picture.box((110, mid), (100, h), ["step(x)", "first call"], WHITE)
    picture.box((236, mid), (170, h), ["trace", "the eager lane, once,", "on tensors without data"], GREEN)
    picture.box((432, mid), (170, h), ["passes", "merge moves, bucket", "all-reduces, late waits"], GREEN)
    picture.box((628, mid), (170, h), ["local program", "the same text on every rank"], YELLOW)
    picture.box((824, mid), (138, h), ["replay", "each later call"], BLUE)
    picture.box((628, mid + 82), (170, h), ["Inductor", "one rank compiles,", "the others load"], YELLOW)
    picture.box((824, mid + 82), (138, h), ["machine code", "each later call"], BLUE)
    for x, to in ((210, 236), (406, 432), (602, 628), (798, 824)):
        picture.arrow([(x, mid + h / 2), (to - 1, mid + h / 2)])
    picture.arrow([(713, mid + h), (713, mid + 81)])
    picture.arrow([(798, mid + 82 + h / 2), (823, mid + 82 + h / 2)])
    # the transport
    picture.box((110, 390), (852, 62), [], RED)
    picture.text((126, 426), "transport", 14, 600, anchor="start")
    picture.text((208, 426), "all_reduce · all_gather · reduce_scatter · all_to_all · exchange", anchor="start")
    picture.box((590, 402), (170, 38), ["process groups", "Gloo, NCCL: torchrun"], WHITE)
    picture.box((776, 402), (170, 38), ["simulated ranks", "plain python"], WHITE)
    picture.arrow([(893, mid + 82 + h), (893, 389)])
    picture.arrow([(962, mid + h / 2), (970, mid + h / 2), (970, 421), (963, 421)])
    return picture.svg()


PICTURES = {"architecture.svg": architecture, "dataflow.svg": dataflow}

if __name__ == "__main__":
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw())
