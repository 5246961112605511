"""Docstrings as Markdown: examples become blocks of code, and aligned words with their meanings become lists."""

import re

from griffe import Extension


def as_markdown(text):
    """A docstring with its examples fenced and its aligned lists as lists.

    >>> as_markdown("Sum.\\n\\nleft   one\\nright  other")
    'Sum.\\n\\n- `left`: one\\n- `right`: other'
    """
    blocks = re.split(r"\n{2,}", text.strip())
    return "\n\n".join(_block(block) for block in blocks)


def _block(block):
    lines = block.split("\n")
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
    if start is not None:
        before = "\n".join(lines[:start]) + "\n\n" if start else ""
        return before + "\n".join(["```pycon", *lines[start:], "```"])
    if re.match(r"[\w/,\" ]+? {2,}\S", lines[0]):
        return "\n".join(re.sub(r"^(\S.*?) {2,}(\S)", r"- `\1`: \2", line) for line in lines)
    return block


class Docstrings(Extension):
    """Rewrites every docstring before it is shown."""

    def on_instance(self, *, obj, **kwargs):
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
