"""Where else the metrics of a run go, besides metrics.jsonl: one file per service, each reached by `_target_`."""
