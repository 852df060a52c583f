"""One training run in its folder, and what is done with its checkpoints afterwards.

In reading order:

    open_run            build all parts of a run, from its config and data
    run                 train, validate, save, stop in good order, finish
    validator           score the held-out cases on all ranks
    validation          score one case; label maps and their pictures
    fingerprint         what a resumed run compares: cases, files, precision
    training_state      state_dict and load_state_dict of a run
    checkpoint          the one reader of checkpoints, which checks what it read
    checkpoint_manager  which checkpoints are kept; go on from the newest
    pretrained          `init=`: begin with the weights of another network
    predict             trained networks on files
    origins             predictions.jsonl: which network wrote which label map
    publish             checkpoints for others: published, scored
    api                 `unet3d.load(...).segment(...)`
"""
