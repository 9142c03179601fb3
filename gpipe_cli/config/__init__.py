"""What a run can be told: the typed settings, their composition from YAML, and their checks."""
