"""What Dynamo traces in place of code of libraries that would cut a graph in two, where treefx compiles it.

In: functions of transformers and TRL, as Dynamo comes to them. Out: calls of one operator each.
"""
