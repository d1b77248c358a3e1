"""Programs of trainers that have no command line of their own: each ``python -m``, in the trainer's environment.

In: the folder of model and rows, and where the log goes. Out: that log, in the form of transformers' trainer. Each
imports its trainer, and none another one.

Order of imports, each only of what stands before an arrow::

    log, chats -> lightning, verl_actor
"""
