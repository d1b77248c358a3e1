"""Count the shared tokens of a model's calls, and leave the calls unchanged.

``treefx.observe``, ``treefx run --observe`` and ``options={"observe": True}`` lead here.

In: the arguments of each call. Out: tokens per call and per optimizer step, and the rows of the last step, from which
``treefx.inspection.observation`` makes a table. A call copies its token ids to the host and waits for no device; they
are counted when the next call comes. Nothing here changes an argument, a result or a draw of random numbers.

Order of imports, each only of what stands before an arrow::

    host_copies -> tokens -> tallies -> observer -> observed_graph, hooks
"""
