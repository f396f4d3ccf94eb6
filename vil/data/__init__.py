"""Data pipeline from files to batches on the model's device.

The stages are splits (images and classes), samplers (order), readers (content of files in workers, within the limits of
images), host_loader or device_loader (decoding and augmentation on the host or the device), and augmentation (of whole
batches). `loaders` combines these stages; `workers` manages the worker processes.
"""
