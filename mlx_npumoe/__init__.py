"""Run Mixture-of-Experts models on Apple Silicon with MLX and the Neural Engine."""
