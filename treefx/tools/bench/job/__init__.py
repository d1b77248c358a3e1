"""The work that is measured: small models, batches, rollouts through a backend and a baseline, their report, and a
process of its own for each piece where one may not survive.
"""
