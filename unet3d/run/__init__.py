"""One training run in its folder, and what is done with its checkpoints afterwards.

In reading order:

    job                 one training from its config to its report
    run                 build all parts of a run; train, validate, save, stop in good order, finish
    validation          score held-out cases, within a run on all ranks; label maps and their pictures
    checkpoint          files of tensors, read with distrust; the trained networks in them
    training_state      what a run's checkpoints hold, which are kept; what a resumed run checks, compares and loads
    pretrained          `init=`: begin with the weights of another network
    predict             trained networks on files; `unet3d.load(...).segment(...)`
    predicted_files     which files are cases; predictions.jsonl: which network wrote which label map
    publish             checkpoints for others: published, scored; a cross-validation's tables, and its networks as one
    run_folder          a run folder's files, which `record` reads for a report
"""
