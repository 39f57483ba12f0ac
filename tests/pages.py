"""Reads the pages of reports."""

import re
from html.parser import HTMLParser

__all__ = ["Page"]


class Page(HTMLParser):
    """Collects rows of tables and checks that tags are balanced."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.open, self.rows, self.attributes, self.text = [], [], [], ""
        self.feed(self.html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open[-2:]):
            self.rows[-1][-1] += data

    @property
    def titles(self):
        return re.findall(r"<h2>(.*?)</h2>", self.html)
