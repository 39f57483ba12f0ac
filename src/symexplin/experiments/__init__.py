"""The paper's tables and figures as code over the laboratory: protocols, runs, comparison with the paper's numbers."""

__all__: list[str] = []
