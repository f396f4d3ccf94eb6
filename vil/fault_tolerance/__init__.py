"""Fault tolerance: keep a process alive through lost output, signals, failing disks and dead processes."""
