"""The directories that `gpipe export` writes for the libraries of Hugging Face."""
