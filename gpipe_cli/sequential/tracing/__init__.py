"""Any model as a sequence of layers, by recording what it does with a sample: see `convert`."""
