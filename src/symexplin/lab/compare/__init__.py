"""Comparisons: variants over learning rates and seeds, and the table of what came out."""

__all__: list[str] = []
