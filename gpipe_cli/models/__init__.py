"""Model families, one file each; reached through a YAML _target_."""
