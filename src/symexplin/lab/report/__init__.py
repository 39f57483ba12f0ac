"""Pages that show a run or a comparison."""

__all__: list[str] = []
