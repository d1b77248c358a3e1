"""What libraries keep for a whole process, and a test must not leave to the next one."""

import os
import sys

__all__ = ["forget_accelerate"]


def forget_accelerate() -> None:
    """Forget the state that all Accelerators share, and what TrainingArguments have put into the environment.

    An unfinished loader decides when accumulated steps are taken, and until the garbage collector finds it;
    the name of a compiler in the environment has every later Accelerator compile.
    """
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
