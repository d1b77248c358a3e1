"""Attention as mathematics: masks, biases and scores lifted from the graph into expressions of (batch, head, query,
key).

In: labelled subgraphs that lead into attention. Out: one expression per attention, proved causal, with what only
padding needs kept apart. ``score_algebra`` knows expressions, ``lift_mask`` reads graphs, ``attention_facts`` joins
both.
"""
