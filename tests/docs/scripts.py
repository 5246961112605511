"""What documents show beside code: the output it prints. `...` stands for any text in a line, alone for any lines."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The tour and the guides: scripts whose comments are prose, and whose `# →` comments are what is printed.
SCRIPTS = [
    ROOT / "docs" / "tour.py",
    *(path for name in ("guides", "extending") for path in sorted((ROOT / "docs" / name).glob("*.py"))),
]


def promised(script: str) -> str:
    """The output that a script shows.

    >>> promised("print(1)\\n# → 1\\n# prose\\nif x:\\n    print()\\n    # →\\n")
    '1\\n\\n'
    """
    return "".join(f"{line}\n" for line in re.findall(r"^ *# →(?: (.*)|$)", script, re.MULTILINE))


def code_blocks(markdown: str) -> list[tuple[str, str]]:
    """Each block of Python with the block of output right behind it, if there is one.

    >>> code_blocks("```python\\nprint(1)\\n```\\n\\n```text\\n1\\n```\\n")
    [('print(1)\\n', '1\\n')]
    """
    return re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", markdown, re.S)


def as_pattern(shown: str) -> str:
    """A regular expression for all outputs that the one shown stands for.

    >>> bool(re.fullmatch(as_pattern("a ... c\\n...\\nd\\n"), "a b c\\n1\\n2\\nd\\n"))
    True
    """
    return "".join(_line_pattern(line) for line in shown.splitlines())


def _line_pattern(line: str) -> str:
    return r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"


def check_output(printed: str, shown: str, where: str) -> None:
    """Raise unless what was printed is what the document shows."""
    assert re.fullmatch(as_pattern(shown), printed), f"{where} shows\n{shown}\nand prints\n{printed}"
