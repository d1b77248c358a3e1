"""Parse traces of rollout engines: token ids, loss masks, log-probabilities, rewards and groups as recorded.

A record (``files.Value``) comes in, a `Trace` goes out: a tree of token runs, of which each leaf ends a row. No
tokenizer is involved. ``vectors`` checks lists of numbers, ``steps`` chains the calls of a model.

Order of imports, each only of what stands before an arrow::

    trace, vectors -> steps -> verifiers, nemo_gym, slime, verl -> __init__
"""
