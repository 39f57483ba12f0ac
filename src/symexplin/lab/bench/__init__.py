"""Measurements of what the map costs: `symexplin bench`, see `benchmarks/README.md`."""

__all__: list[str] = []
