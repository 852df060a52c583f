"""The command line. In reading order:

main (all commands), commands (the short ones), predict; memory, memory_of_config, memory_of_module, memory_of_several,
memory_below.
train (main and `unet3d.train`), arguments, plan, sweep, hydra_app, lifecycle, training_job (one training; loads torch).
options (the help), process, interrupt.
"""
