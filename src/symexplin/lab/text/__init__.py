"""Text: documents, their split and tokens, prepared folders, and the batches that training reads."""

__all__: list[str] = []
