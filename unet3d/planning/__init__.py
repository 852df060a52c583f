"""Plans: what suits a data set's sizes and what fits a budget.

`architecture` has the rules by which spacing, depth, kernels and strides follow from sizes, in plain numbers; it stands
below `data`, whose advice calls it.
"""
