"""What comes from the Hugging Face hub or from its cache: one short try, then one line that says what was missing."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["hub_dataset", "hub_file"]

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
    except Exception as error:  # the clients raise errors of their own, of several libraries
        raise ValueError(
            f"{name} of {repository!r} was not fetched from the Hugging Face hub: {_line(error)}"
        ) from None


def hub_dataset(name: str, config: str | None, split: str) -> Any:
    """Return one split of a dataset of the hub, or of a local folder of one, as a `datasets.Dataset` on the disk.

    Args:
        name: on the hub; or a folder that `datasets.load_dataset` reads or that `save_to_disk` wrote.
        config: of the dataset; None: its only or default one.
        split: its name, or a slice such as "train[:1%]".

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no package `datasets`; no such dataset, config or split; out of reach and not cached.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(f"source 'hf:{name}' needs the package 'datasets': pip install 'symexplin[hf]'") from None
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if not local and (name.startswith(("~", ".", "/")) or not name):
        raise FileNotFoundError(f"sources must name existing folders after 'hf:', got {name!r}")
    offline = not local and not _reachable()
    try:
        with _settings(datasets, offline):
            if any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
                return _saved(datasets.load_from_disk(str(folder)), name, split)
            return datasets.load_dataset(str(folder) if local else name, config, split=split)
    except Exception as error:  # builders raise errors of every kind
        if offline:
            raise ValueError(
                f"dataset {name!r}{f' ({config})' if config else ''} would be fetched from the Hugging Face hub, which "
                "cannot be reached, and no copy is cached: give a local file or folder instead (text, .jsonl, .gz, "
                ".xz), or 'hf:FOLDER' with a saved dataset"
            ) from None
        raise ValueError(f"source 'hf:{name}' cannot be loaded: {_line(error)}") from None


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


@contextlib.contextmanager
def _settings(datasets: Any, offline: bool) -> Iterator[None]:
    """Keep `datasets` from retrying where there is no hub, from logging, and from drawing bars into files."""
    from huggingface_hub.utils import logging

    libraries = (logging, datasets.utils.logging)
    levels = [library.get_verbosity() for library in libraries]
    was_offline, bars = datasets.config.HF_HUB_OFFLINE, not datasets.are_progress_bars_disabled()
    try:
        for library in libraries:
            library.set_verbosity_error()
        datasets.config.HF_HUB_OFFLINE = was_offline or offline
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
        datasets.config.HF_HUB_OFFLINE = was_offline
        if bars:
            datasets.enable_progress_bars()


def _line(error: Exception) -> str:
    """Return the first line of an error's text, with its kind."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
