"""Exception for untrusted weight files that are rejected."""


class TorchFileError(ValueError):
    """A weight file is damaged, or contains values that a state dict does not need. The message gives the reason."""
