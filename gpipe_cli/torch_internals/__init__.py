"""Every use of torch's private or unstable names, one file per need."""
