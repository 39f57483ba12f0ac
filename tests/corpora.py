"""Small prepared texts that several tests train on."""

from symexplin.lab.data.prepare import PrepareConfig, prepare

__all__ = ["TEXTS", "prepared"]

TEXTS = [f"document {i} says {i * i} and {i % 5}, which is all there is to say" for i in range(80)]


def prepared(folder, texts=TEXTS, **options):
    """Write `texts` into `folder` and prepare them there, with byte tokens if nothing else is said."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "text"
    source.write_bytes("\0".join(texts).encode())
    config = PrepareConfig(sources=(str(source),), **{"tokenizer": "byte", "workers": 1, **options})
    prepare(config, folder / "data", progress=False)
    return str(folder / "data")
