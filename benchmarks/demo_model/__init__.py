"""A small Mixture-of-Experts model trained here: corpus, tokenizer, training (torch), export to an mlx-lm folder.

The only place in the repository that may import torch. Modules import each other only, so they also run in an
environment of their own that has torch and nothing of ours: `python -m benchmarks.demo_model.train` from the
repository root.
"""
