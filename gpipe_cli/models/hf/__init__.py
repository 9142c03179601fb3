"""Models of Hugging Face transformers, from a local directory with config.json and safetensors files."""
