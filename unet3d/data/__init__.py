"""Data sets on disk, and the patches that are learned from.

In reading order:

- `prepare`: a data set made ready for a run, volumes as training cases; the way through all of the following.
- `cases`, `layouts`: a data set as names, whatever its layout on disk; a layout is a file. The phantom is one.
- `texts`, `labels`: what layouts share: texts that are not trusted, labels that become classes.
- `splits`: training and held-out cases, and groups of cases.
- `nifti`: NIfTI files, header before voxels.
- `volume`: where voxels lie; a case on the network's grid, and label maps.
- `check`: one scan of headers, and what they and voxels say is wrong; twins among cases.
- `restore`: predictions back on the file's grid, in files or in memory.
- `intensity`, `cache`: rules for intensities; hashes of files, and prepared cases in files.
- `patches`, `loader`: from cases to batches.
"""
