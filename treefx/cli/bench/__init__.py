"""``treefx bench``: the benchmarks, each run in one process with what it is compared with.

Order of imports, each only of what stands before an arrow::

    app -> kernels, plans, steps
"""

from treefx.cli.bench import kernels, plans, steps
from treefx.cli.bench.app import bench

__all__ = ["bench", "kernels", "plans", "steps"]
