"""Plans: what suits a data set's sizes and what fits a budget. Read them in this order.

`fingerprint` reads a data set. `plan` has the plan in the making, and decides what follows from the data or the time;
`for_budget` makes it, and decides what follows from memory, by `steps`: which patches there are (also nnU-Net's own),
what steps on them need, and how long they take.
"""
