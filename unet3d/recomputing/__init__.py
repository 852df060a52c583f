"""Train any network in less memory: its training pass follows a schedule that keeps few maps.

In reading order:

    graph           a network as operations on maps
    observer        who watches which layer a pass works on
    looking         objects as values to compare
    readable        all that a forward pass can read, as a value to compare
    refusals        lines for networks that a schedule cannot repeat
    blocks          parts of forward without gradients or in a precision of their own
    watching        what a trace cannot carry, watched while it is made
    nodes           questions about the operations of a trace
    exported        how the graph is read from what torch.export gives
    trace           a network, traced
    state           what a pass has beside its maps
    rules           an operation on a few rows: the interface
    pointwise       rules of pointwise operations and of dropout
    joining         rules of concatenation, slices, padding
    convolution     rules of convolutions, with their `convolution_settings`
    halves          few rows of one image, convolved as two images: quicker on the CPU
    affine          an affine function and sums of each channel, of large maps on a GPU
    statistics      statistics of normalisations
    normalisation   rules of normalisations
    resampling      rules of pooling and interpolation
    reductions      means, sums and norms over all rows, in two steps
    derived         tensors computed from weights alone
    along           operations that can be carried out in parts, along windows or tokens
    groups          operations without a rule that are carried out at once
    operations      their work
    maps            which values exist as a whole, and how each follows from others
    tiles           rows of one map: made, and their gradient sent to the maps before
    making          a map written tile by tile, also over a source
    sending         a map's gradient, sent to its sources tile by tile
    instructions    what a pass may do with a map or a gradient
    costs           the sizes of maps, from which schedules are made
    stages          stages of a pass, and what is alive between them
    compiler        a stage, compiled into instructions and bytes
    schedule        a table of the maps that stay, compiled stage by stage
    soundness       whether no instruction reads what is not there
    changes         changes of a table of the maps that stay
    search          the schedules that none beats in both bytes and work
    program         maps, their tiles and schedules, for images of one size
    whole           a group, carried out
    run             a schedule, carried out
    function        a pass as one autograd function
    meta_kernels    operations on tensors without data, quickly
    gradient_sums   sums of gradients that autograd writes in place, for what counts bytes
    scratch         the tensors beside maps meanwhile, measured on tensors without data
    sizes           all that the search has to know
    prepare         a network's program, from its trace to its sizes, and the choice of a schedule
    module          `unet3d.recompute`
"""
