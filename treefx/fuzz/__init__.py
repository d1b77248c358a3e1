"""Random search for programs that break the promise: small models and training steps, treefx against eager.

From left to right, each file imports only what stands before it::

    program -> parts, embeddings, layers, autograd, masks, scores, attention, losses, outputs, inputs, batches, calls
            -> grammar (a program from a seed), script (its text) -> truth (its outcome) -> worker -> shrink -> search
"""
