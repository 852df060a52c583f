"""Reports: what a run leaves for its reader.

Read these in order. The files of a run folder are in `unet3d.run`: run_folder, record. Loggers: loggers. Figures:
plots (shared parts; training curves, comparisons), memory_plots, held_out (of cases, with the tables of their scores).
The report of a run: report (its page from templates/, its summary in sentences and numbers, a paper's paragraph),
explained (of a network that was only profiled). Several runs: compared_runs (also cross-validations), compare (and
tables of folds for papers).
"""
