"""Configuration: typed settings, their composition from YAML and overrides, and their checks."""
