"""Run the command line as `python -m symexplin`."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line, or name the extra that it needs."""
    try:
        from symexplin.cli import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"symexplin: error: {error}; install the extra 'lab': pip install '.[lab]' in a clone of symexplin\n"
        )
        return 2
    status = run()
    if parallel := sys.modules.get("symexplin.lab.parallel"):  # without it no job was joined
        parallel.leave(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
