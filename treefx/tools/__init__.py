"""Tools that measure, attack and predict treefx; the library never imports them.

``kernels`` compiles generated kernels without a GPU and reads the result; ``simulate`` predicts
what overlapping communication is worth; ``bench`` measures, with the zoo of models; ``fuzz`` searches for programs
that break the promise; ``troubleshooting`` makes the page of codes, ``reference_pages`` those of
options and patches, ``rows_picture`` and ``screenshots`` the pictures of the docs; ``words`` checks the prose of the
repository. Their libraries are in the extra ``[tools]``.

Order of imports, each only of what stands before an arrow::

    kernels, reference_pages, rows_picture, simulate, troubleshooting, words -> bench -> fuzz, screenshots
"""
