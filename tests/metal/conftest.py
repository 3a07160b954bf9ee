"""
Fixtures that run Metal kernels: on the GPU of a Mac, and elsewhere on the emulator.

The emulator needs a compiler. If there is none, `tests/conftest.py` leaves these tests out.
Where CI is set, they fail instead.
"""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from metal import emulator, toolchain


@pytest.fixture(scope="session")
def compiler() -> None:
    """Fails if there is no compiler for the emulator."""
    toolchain.require_toolchain()


@pytest.fixture
def needs_emulator(compiler: None) -> None:
    """Skips tests of the emulator itself on a Mac, where the emulator is not used."""
    if mx.metal.is_available():
        pytest.skip("the emulator is for machines without Metal; here the kernels run on the GPU")


@pytest.fixture(params=["check"])
def metal(request: pytest.FixtureRequest) -> Iterator[str]:
    """
    Makes `mx.fast.metal_kernel` work; returns "gpu" or the emulator's mode.

    A test chooses the mode with `indirect`.
    """
    if mx.metal.is_available():
        yield "gpu"
        return
    request.getfixturevalue("compiler")
    with emulator.emulate_metal(request.param):
        yield request.param
