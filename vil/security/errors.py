"""Exception for untrusted weight files that are rejected."""


class TorchFileError(ValueError):
    """A weight file is damaged, has an unsupported format, or contains more than a state dict needs."""
