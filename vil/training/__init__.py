"""Parts of `train_imagenet.py`: losses, a teacher, gradients in one piece of memory, phases, summary."""
