"""Reports: what a run leaves for its reader.

Read these in order. Files of a run folder: run_folder (written during a run), environment, memory_file (memory.json),
record (all of it, read back), shapes (which values are trusted). Loggers: loggers, terminal_logger, wandb_logger,
tensorboard_logger. Scores: case_scores, score_tables. Figures: plots (shared parts, training curves), score_plots,
case_plots, memory_plots, comparison_plots. The report of a run: report, facts, page (HTML from
templates/), methods and methods_data (a paper's paragraph), summary (the closing lines), explained (of a network that
was only profiled). Several runs: compared_runs, folds, differences, compare.
"""
