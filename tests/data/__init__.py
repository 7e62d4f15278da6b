"""Tests of fedhur_app.data."""
