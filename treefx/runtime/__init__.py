"""Run one call of a compiled graph, from its inputs to its outputs.

In: the inputs of a call and the analyses of the passes. Out: its outputs, and a record of the call (``report``).

Order of imports, each only of what stands before an arrow::

    lost_sharing, reason, token_bits, origins -> whole, call_log, run_record
    -> dynamo, places, cut -> padding -> blocks, segments, output_keys -> shapes
    -> call_plan, structured_log -> records -> announce, lazy, analyses -> ways, observed -> converted, compiled_graph
"""
