"""Model families. To add one, write a file with `build(...)`, and a YAML file in conf/model that names it."""
