"""Data sets on disk, and the patches that are learned from.

In reading order:

- `prepare`: a data set made ready for a run; the way through all of the following.
- `cases`, `dataset_json`, `labels`: layouts, dataset.json, and labels that become classes.
- `synthetic`: the phantom and MNI152, which are generated.
- `nifti`, `nifti_labels`, `nifti_write`: NIfTI files, header before voxels.
- `image_files`, `hashes`, `headers`: the scan, which keeps up to 256 files open for the reading of their voxels.
- `validate`, `twins`, `padding`: what the headers and voxels say is wrong, and whether a patch is mostly padding.
- `grids`, `volume`, `restore`: a case on the network's grid, and predictions back on the file's.
- `preprocess`, `intensity`, `sparse`, `seen`: a volume as a training case, and what all of them are like.
- `disk_cache`, `case_arrays`: prepared cases in files.
- `patches`, `augment`, `loader`: from cases to batches.
- `in_memory`: images that Python code holds.
"""
