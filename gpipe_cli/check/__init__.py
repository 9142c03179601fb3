"""The self-test of a machine behind `gpipe check`: one file per topic, each with a function that yields rows."""
