"""Datasets, one file per family; reached through a YAML _target_."""
