"""A small language-model laboratory: data, a transformer, training, comparison, a report.

It needs the extra `lab`; the core of symexplin never imports it.
"""

__all__: list[str] = []
