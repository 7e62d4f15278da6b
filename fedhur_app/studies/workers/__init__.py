"""Runs of studies that do more than `fedhur run`: each module is a command, see :mod:`.in_process` for its options."""
