"""Whole paths with real processes."""
