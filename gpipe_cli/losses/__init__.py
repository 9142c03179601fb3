"""What is minimised, one loss per file; reached through a YAML `_target_`.

A loss must be a mean over samples: a step weighs the loss of each micro-batch by its samples, so only such a
loss is the same number however a mini-batch is divided. A loss may also have a `measure(output, target)`: what
is counted besides it, as sums over samples. It knows best how an output is to be read.
"""
