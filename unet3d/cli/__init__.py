"""The command line. In reading order:

main (all commands), commands (the short ones), predict; memory, memory_of_config, memory_of_module, memory_of_several.
train (main and `unet3d.train`), plan, sweep, lifecycle.
options (the help).
"""
