"""Files and datasets of the Hugging Face hub, or of its cache; without a network, one line says what was missing."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["hub_dataset", "hub_file", "quiet_datasets"]

# The hub's own clients try six times over 23 seconds where there is no network; one answer tells.
_TRY_SECONDS = 5.0


def hub_file(repository: str, name: str, instead: str) -> Path:
    """Return the path of a file of a model repository: the cached copy if there is one, else a download.

    Args:
        repository: on the hub.
        name: of the file.
        instead: what a user without a network may do, for the message.

    Raises:
        ValueError: neither cached nor within reach.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        return Path(hf_hub_download(repository, name, local_files_only=True))
    if not _reachable():
        raise ValueError(
            f"{name} of {repository!r} would be fetched from the Hugging Face hub, which cannot be reached: {instead}"
        )
    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:  # the client raises errors of several libraries
        raise ValueError(f"{name} of {repository!r} was not fetched from the Hugging Face hub: {_line(error)}") from None


def hub_dataset(name: str, config: str | None, split: str, cache: Path | None = None) -> Any:
    """Return one split of a dataset of the hub, or of a local folder of one, as a `datasets.Dataset` on the disk.

    Args:
        name: on the hub; or a folder that `datasets.load_dataset` reads or that `save_to_disk` wrote.
        config: of the dataset; None: its only or default one.
        split: its name, or a slice such as "train[:1%]".
        cache: where `datasets` keeps its copy of a local folder; None: its usual place.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no such dataset, config or split; out of reach and not cached.
    """
    import datasets

    folder = Path(name).expanduser()
    local = folder.is_dir()
    if not local and (name.startswith(("~", ".", "/")) or not name):
        raise FileNotFoundError(f"sources must name existing folders after 'hf:', got {name!r}")
    offline = not local and not _reachable()
    was_offline = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = was_offline or offline
        with quiet_datasets():
            if any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
                return _saved(datasets.load_from_disk(str(folder)), name, split)
            where = {"path": str(folder), "cache_dir": cache and str(cache)} if local else {"path": name}
            return datasets.load_dataset(name=config, split=split, **where)
    except Exception as error:  # builders raise errors of every kind
        if offline:
            raise ValueError(
                f"dataset {name!r}{f' ({config})' if config else ''} would be fetched from the Hugging Face hub, which "
                "cannot be reached, and no copy is cached: give a local file or folder instead (text, .jsonl, .gz, "
                ".xz), or 'hf:FOLDER' with a saved dataset"
            ) from None
        raise ValueError(f"source 'hf:{name}' cannot be loaded: {_line(error)}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


@contextlib.contextmanager
def quiet_datasets(progress: bool = True) -> Iterator[None]:
    """Keep `datasets` from logging, and from drawing bars unless `progress` and standard error is a terminal.

    >>> import datasets
    >>> with quiet_datasets(progress=False):
    ...     datasets.are_progress_bars_disabled()
    True
    """
    import datasets
    from huggingface_hub.utils import logging

    libraries = (logging, datasets.utils.logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = not datasets.are_progress_bars_disabled()
    try:
        for library in libraries:
            library.set_verbosity_error()
        if not (progress and sys.stderr.isatty()):
            datasets.disable_progress_bars()
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _saved(found: Any, name: str, split: str) -> Any:
    if not isinstance(found, dict):  # a lone split has no name
        return found
    if split not in found:
        raise ValueError(f"split must be one of {', '.join(map(repr, found))} in {name!r}, got {split!r}")
    return found[split]


def _reachable() -> bool:
    """Tell whether the hub answers at all, through whatever proxy the environment names."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_TRY_SECONDS)
    except Exception:  # of the HTTP client, which differs between versions; or the user's own offline mode
        return False
    return True


def _line(error: Exception) -> str:
    """Return the first line of an error's text, with its kind."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
