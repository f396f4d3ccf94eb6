"""Loading on the model's device: decoding and augmentation of whole batches."""
