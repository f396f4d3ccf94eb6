"""Survival of a process: lost output, signals, failing disks, and the end of other processes."""
