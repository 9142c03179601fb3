"""What each layer costs, measured as the pipeline would run it."""
