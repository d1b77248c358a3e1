"""Replace library code that would break a graph in Dynamo's traces.

In: functions of transformers and TRL, as Dynamo comes to them. Out: calls of one operator each.
"""
