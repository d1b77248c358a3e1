"""Lift masks, biases and scores into expressions of (batch, head, query, key).

In: labelled subgraphs that lead into attention. Out: one expression per attention, proved causal, with conditions of
    padding kept apart. ``score_algebra`` knows expressions, ``lift_mask`` reads graphs, ``attention_facts`` joins
both.
"""
