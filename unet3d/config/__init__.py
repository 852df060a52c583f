"""The options of a run. In reading order:

schema (each option), rules, data_rules (options at odds, or that do nothing), compose (from a command line to a
`Config`, by Hydra; that of a resumed run; a plan's file), words (which options they set, their texts, and what is wrong
with them, in a line).
"""
