"""What pytest does not collect: the doctests of symexplin.timm, which tests/test_timm.py runs without torchvision."""

__all__ = ["collect_ignore_glob"]

collect_ignore_glob = ["src/symexplin/timm.py"]
