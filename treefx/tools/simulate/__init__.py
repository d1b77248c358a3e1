"""Simulators: what communication costs, and what hiding it behind the work would save.

In: sizes of products and collectives, and a machine or a link. Out: seconds and bytes.

``hardware`` is T3's machine (Pati et al., ASPLOS 2024, arXiv 2401.16677), event by event; ``sublayer`` runs one
sub-layer of a model on it in every configuration of the paper, ``study`` all of them, and ``published`` holds the
result against the paper. ``chunks`` is the form in software: the same clock and link say into how many chunks a product
and its collective should be cut.

Order of imports, each only of what stands before an arrow::

    hardware -> chunks, models -> sublayer -> study -> published -> picture, report
"""
