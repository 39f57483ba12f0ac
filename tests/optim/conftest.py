import pytest

from symexplin import kernels


@pytest.fixture(params=["auto", "readable"])
def path(request):
    """Run a test with kernels, where there are some, and in pure PyTorch."""
    with kernels.using(request.param):
        yield request.param
