"""Compiling ahead, and an installation where nothing can be kept."""

import subprocess
import sys

import pytest

from deltawire.codec.warm import warm

pytest.importorskip("numba")


def test_warming_compiles_every_loop() -> None:
    warm()

    from deltawire.codec import kernels_numba

    loops = [loop for loop in vars(kernels_numba).values() if hasattr(loop, "signatures")]
    named = {loop.__name__ for loop in loops if loop.signatures}
    assert {"_find_changes", "_class_positions", "scatter"} <= named
    assert len(kernels_numba._find_changes.signatures) >= 2  # plain, and rounding fp32


def test_where_no_cache_can_be_written_the_loops_still_compile() -> None:
    """numba raises when it finds no place for its cache; the loops must not care."""
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "from deltawire.codec import kernels\n"
        "import numpy as np\n"
        "out = np.empty(1, np.uint16)\n"
        "kernels.load().gather(np.array([3, 4], np.uint16), np.array([1], np.int32), out)\n"
        "assert out[0] == 4\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_numba_everything_runs_on_numpy() -> None:
    code = (
        "import sys\n"
        "sys.modules['numba'] = sys.modules['llvmlite'] = None\n"
        "from deltawire.codec import kernels\n"
        "from deltawire.codec.warm import warm\n"
        "warm()\n"
        "assert kernels.load().__name__.endswith('kernels_numpy')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
