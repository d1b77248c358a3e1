"""What trainers feed to a model, one test or more for every form; ``test_forms`` has the list."""
