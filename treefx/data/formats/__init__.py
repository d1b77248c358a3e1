"""Parse records (``files.Value``) into conversations, pairs or judged answers.

Order of imports, each only of what stands before an arrow::

    openai_chat -> tau_bench, toolbench, preferences, verifiers_results -> trials -> __init__
"""
