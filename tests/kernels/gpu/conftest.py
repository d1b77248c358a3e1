"""Fixtures of tests that compile Triton kernels."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def fresh_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the tests of a file share what they compile, and nothing with what was compiled before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEFX_CACHE_DIR", str(tmp_path_factory.mktemp("treefx")))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
