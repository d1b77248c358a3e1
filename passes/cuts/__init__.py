"""What crosses the cuts of a forest that runs in parts: keys and values, and the last inputs of convolutions.

In: a packed graph. Out: the same graph with a boundary as inputs and the outgoing tokens' keys and values as outputs.
"""
