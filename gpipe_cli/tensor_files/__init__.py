"""Files of tensors in the safetensors format, checked before anything of them is used."""
