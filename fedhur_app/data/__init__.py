"""Data: file formats, interactions, splits, client shards, the catalog of data sets and a generator."""
