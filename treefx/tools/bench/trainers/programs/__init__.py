"""Provide programs for trainers without a command line, and torchtune's components.

In: the folder of model and rows, and where the log goes. Out: that log, in the form of transformers' trainer. Each
runs in its trainer's environment and imports it, and none another one.

Order of imports, each only of what stands before an arrow::

    log, chats -> lightning, ray_train, torchtitan, torchtune, verl_actor
"""
