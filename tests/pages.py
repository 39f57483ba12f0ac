"""Reads the pages of reports."""

import html
import re

__all__ = ["Page"]

VOID = {"meta", "br", "path", "use", "rect"}


def _text(source):
    return html.unescape(re.sub(r"<[^>]*>", "", source))


class Page:
    """The text, tables, titles and attributes of a page, whose tags must be balanced."""

    def __init__(self, path):
        self.html = path.read_text(encoding="utf-8")
        self.text = _text(self.html)
        self.titles = [_text(title) for title in re.findall(r"<(?:h2|summary)>(.*?)</", self.html)]
        rows = re.findall(r"<tr.*?</tr>", self.html, re.DOTALL)
        self.rows = [[_text(cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)] for row in rows]
        self.attributes = re.findall(r'([\w:-]+)="([^"]*)"', self.html)
        ends = []
        for end, name, alone in re.findall(r"<(/?)([a-z][\w:]*)[^>]*?(/?)>", self.html, re.IGNORECASE):
            if end:
                assert ends.pop() == name
            elif not alone and name not in VOID:
                ends.append(name)
        assert ends == []
