"""Libraries that only some measurements need, imported when they are used."""

import importlib
import logging
from typing import Any

__all__ = ["extra"]


def extra(module: str, wanted_by: str) -> Any:
    """Return a module of the extra "evidence", without its warnings about GPUs that are not there.

    Raises:
        ModuleNotFoundError: the library is missing; the message names the key that wants it and the remedy.
    """
    try:
        logging.disable(logging.WARNING)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name != library:
            raise
        remedy = "pip install 'symexplin[evidence]'"
        raise ModuleNotFoundError(f"{wanted_by} needs {library}: {remedy}", name=library) from None
    finally:
        logging.disable(logging.NOTSET)
