"""Data pipeline from files to batches on the model's device: source, decode, augment, batch.

`sources`   images and classes of a split: folders, tar files, shards and timm's other readers
`samplers`  order of the images, and the share of each rank
`plan`      whether workers or the device decode and augment a split, and how much is prefetched
`host`      workers that read, decode and augment images, and the loader of their batches
`device`    decoding and augmentation of whole batches on the device, and the loader of such batches
`loaders`   loaders of training and evaluation, which combine these parts
"""
