"""Facts as lines, tables, pictures, trace files and HTML pages."""
