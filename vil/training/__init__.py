"""Training runs: the `Trainer` in trainer.py and the components of the `Trainer`."""
