"""Training of a run: the `Trainer` in trainer.py, and its components."""
