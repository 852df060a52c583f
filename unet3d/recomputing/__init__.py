"""Train any network in less memory: its training pass follows a schedule that keeps few maps.

In reading order:

    graph           a network as operations on maps, what is computed of weights alone, and questions about operations
    readable        all that a forward pass can read, as a value to compare
    exported        how the graph is read from what torch.export gives
    state           what a pass has besides its maps, and who watches it
    trace           a network, traced, and watched for what a trace cannot carry
    rules           an operation on a few rows: the interface, and a file for each kind of operation
    groups          operations without a rule that are carried out at once, or in parts along windows or tokens
    maps            which values exist as a whole, and how each follows from others
    compiler        a stage, compiled into instructions and bytes
    search          tables of the maps that stay, compiled stage by stage; those that none beats in bytes and work
    program         maps, their tiles and schedules for images of one size, and which of these a step follows
    compute         one map: computed, and its gradient sent to the maps before, by tiles or as a group
    run             a schedule, carried out: a pass as one autograd function
    workspaces      what cuDNN takes within a convolution
    fake_kernels    operations on tensors without data: quickly, and as kernels do them
    scratch         an instruction's workspace, measured on tensors without data
    prepare         a network's program, from its trace to the sizes that the search has to know
    module          `unet3d.recompute`
"""
