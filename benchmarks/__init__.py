"""Benchmarks: ``python -m benchmarks.<name>`` prints what was measured, on what."""
