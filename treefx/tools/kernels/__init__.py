"""What can be known of a generated kernel without a device that runs it.

In: a launch, or the text that Triton made of it. Out: what the assembler says, and hazards in words. ``ahead_of_time``
compiles; ``barriers`` follows the buffers of warp-specialised kernels from hand to hand; ``pipeline`` reads how far the
loops load ahead; ``instructions`` counts what they cost; ``operands`` follows the registers of products under way.
``amdgcn`` reads the assembly of AMD.
``stand_in`` lets the host launch on a device that is not there.

Order of imports, each only of what stands before an arrow::

    amdgcn, barriers, pipeline, instructions, operands, stand_in -> ahead_of_time
"""
