"""Reads the code of documents."""

import re

__all__ = ["blocks"]

_FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def blocks(page, kind):
    """Return the fenced blocks of a kind, without their indentation."""
    found = _FENCED.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"(?m)^{indent}", "", text) for indent, language, text in found if language == kind]
