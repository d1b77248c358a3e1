"""Search randomly for programs whose results differ from eager execution.

In: a seed. Out: a program (``program``, drawn by ``draft`` and ``grammar``), its text (``script``), its outcome
(``truth``), and where that is wrong the smallest program that still is (``shrink``). ``samples`` has programs of
another kind: PyTorch's own samples of its operators and modules.

Order of imports, each only of what stands before an arrow::

    program, journal -> families -> script, describe -> draft -> grammar, truth -> samples
    -> report, preloaded, worker, shrink -> search -> sample_search
"""
