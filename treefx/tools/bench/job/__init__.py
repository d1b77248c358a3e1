"""Run measured work: models, batches, rollouts, reports, and one process per piece."""
