"""A federation on real devices: keys, folders to copy, processes that are kept alive, the operator's commands."""
