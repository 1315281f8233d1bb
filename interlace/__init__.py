"""Interlace trains mixture-of-experts models on PyTorch and hides what the GPUs would wait for."""

__version__ = "0.1.0"
