"""Facts become lines, tables, bars and JSON."""
