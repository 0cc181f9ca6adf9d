"""Benchmarks of mlx_npumoe. Imported as `mlx_npumoe.benchmarks`."""
