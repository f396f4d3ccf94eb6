"""Loading on the host: worker processes that decode and augment images."""
