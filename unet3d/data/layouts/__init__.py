"""Layouts of data sets on disk, a file each: a function below `@layout(...)` of `unet3d.data.cases` is `data=NAME`."""
