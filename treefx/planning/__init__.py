"""Trees larger than memory: cost model, planner, plan and its views."""
