"""Model families, one file each, which the YAML files of conf/model name by `_target_`."""
