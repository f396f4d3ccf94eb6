"""What `train_imagenet.py` and `validate.py` are made of: configuration, data, checkpoints, evaluation, pictures."""
