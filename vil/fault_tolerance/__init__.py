"""Fault tolerance: reactions of a process to lost output, signals, failing disks and dead processes."""
