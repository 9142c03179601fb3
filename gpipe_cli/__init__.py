"""gpipe: pipeline-parallel PyTorch from declarative configs."""
