"""What a figure shows, for the tests of figures."""

__all__ = ["lines", "texts", "title"]


def lines(axes):
    """Return {label: line} of the lines that have a label."""
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def title(axes):
    return axes.get_title(loc="left")
