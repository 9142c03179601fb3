"""One configured run: build it, set up or resume its directory, record it, stop it and summarize it."""
