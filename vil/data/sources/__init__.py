"""Sources of images: folders, tar files, shards and timm's other readers, opened as the splits of a run."""
