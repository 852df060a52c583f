"""The command line. In reading order:

main (all commands), commands (the short ones, predict, and the help), plan_command; memory,
memory_answers. train (main and `unet3d.train`), sweep, lifecycle.
"""
