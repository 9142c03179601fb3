"""The bundled pipeline core: partitions, micro-batches and the workers that run them."""
