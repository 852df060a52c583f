"""The options of a run. In reading order:

schema (each option), rules, model_rules, data_rules (options at odds, or that do nothing), compose (from a
command line to a `Config`, by Hydra), hydra_errors (what is wrong with it, in a line), resume_rules.
"""
