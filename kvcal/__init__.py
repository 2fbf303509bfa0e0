"""Offline calibration for quantized KV caches."""

__version__ = "0.1.0"
