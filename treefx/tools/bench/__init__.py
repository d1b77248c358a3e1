"""Measurements, each with its comparison in the same run, and exactness before any time.

In: a setting from the command line. Out: figures as tables and JSON. ``job`` is the work that is measured, ``zoo``
every architecture, ``attention`` the kernels alone, ``overlap`` collectives between two processes.

Order of imports, each only of what stands before an arrow::

    job -> zoo -> step, first_step, assign, forest, large, memory, overlap, parts, plan, sampler, shapes, trainer,
    trainers, unshared -> calibrate, calls, mixers, policies, attention, context, trl -> gpu
"""
