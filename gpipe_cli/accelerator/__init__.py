"""What differs between kinds of devices: which there are, and copies between them."""
