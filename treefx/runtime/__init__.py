"""Run one call of a compiled graph, from its inputs to its outputs.

In: the inputs of a call and the analyses of the passes. Out: its outputs, and a record of the call (``report``).

Order of imports, each only of what stands before an arrow::

    kept, lost_sharing, reason, token_bits, origins -> whole, call_log, run_record, steps
    -> report, dynamo, output_use, places, batch, cut, lazy -> padding -> blocks, segments, output_keys -> shapes
    -> announce, call_plan, observed, structured_log -> records -> analyses -> ways -> converted, compiled_graph
"""
