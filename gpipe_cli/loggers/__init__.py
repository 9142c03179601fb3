"""Services that receive a run's metrics besides metrics.jsonl, one file per service, named by `_target_`."""
