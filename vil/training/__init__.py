"""Parts of `train_imagenet.py`: gradients in one piece of memory, interruption, measurements, summary."""
