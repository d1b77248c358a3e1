"""The passes of the treefx backend: one file each, applied in the order that ``treefx.passes.pipeline`` states.

Dependencies point one way: passes use ``treefx.kernels`` and know no trainer.
"""
