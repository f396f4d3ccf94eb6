"""Parts of `train_imagenet.py`: gradients in one piece of memory, interruption by signals, the summary of a run."""
