"""Datasets, one file per family, which the YAML files of conf/data name by `_target_`."""
