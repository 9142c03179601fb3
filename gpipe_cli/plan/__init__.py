"""The joint search for a plan: balance, micro-batches, schedule and checkpoint mode, with what they will take."""
