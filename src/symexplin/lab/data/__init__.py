"""Text for training: sources of documents, tokenizers, prepared folders of tokens, and batches."""

__all__: list[str] = []
