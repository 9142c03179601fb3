"""Services that receive a run's metrics besides metrics.jsonl.

To add one, write a file with `build(...)` that returns a `Logger` (see protocol.py), and a YAML file in conf/logger.
"""
