"""Plans: what suits a data set's sizes and what fits a budget. Read them in this order.

`fingerprint` reads a data set. `draft` is a plan in the making. `plan` makes it and decides what follows from the data
or the time, `for_budget` what follows from memory, by `patches` (which ones there are, and nnU-Net's own) and `steps`
(what they need, and how long they take).
"""
