"""Core ML programs out of expert matrices. Imported as `mlx_npumoe.converters`; knows nothing of mlx-lm."""
