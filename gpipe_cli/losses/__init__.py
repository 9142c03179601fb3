"""Losses, which the YAML files of conf/loss name by `_target_`.

A loss must be a mean over samples: a step weights the loss of each micro-batch by its samples, so only such a loss does
not depend on how the mini-batch is divided. A loss that is a mean of something else, such as the tokens it scores, has
a method `row_weights(target)` that returns their number for each sample. A loss may also have a method
`measure(output, target)` that returns metrics as sums over the same.
"""
