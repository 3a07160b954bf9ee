"""
Where Metal kernels run in these tests: on the GPU of a Mac, elsewhere on the emulator.

Without a compiler for the emulator `tests/conftest.py` leaves these tests out, except where CI is set: there they fail.
"""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from metal import emulator, toolchain


@pytest.fixture(scope="session")
def compiler() -> None:
    """A compiler for the emulator is there."""
    toolchain.require()


@pytest.fixture
def emulated(compiler: None) -> None:
    """For tests of the emulator itself, which have no meaning on a GPU."""
    if mx.metal.is_available():
        pytest.skip("the emulator is for machines without Metal; here the kernels run on the GPU")


@pytest.fixture(params=["check"])
def metal(request: pytest.FixtureRequest) -> Iterator[str]:
    """`mx.fast.metal_kernel` works: on a Mac on the GPU, elsewhere emulated in the mode that `indirect` names."""
    if mx.metal.is_available():
        yield "gpu"
        return
    request.getfixturevalue("compiler")
    with emulator.patched(request.param):
        yield request.param
