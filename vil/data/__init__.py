"""From files to batches on the model's device.

splits (which images and classes) -> samplers (in which order) -> readers (what loader processes make of a file, within
the limits of images) -> host_loader or device_loader (who decodes and augments) -> augmentation (what is done to a
batch). `loaders` puts these together; `workers` looks after the processes.
"""
