"""Error of an untrusted file of tensors."""


class TorchFileError(ValueError):
    """A file is damaged, or contains values that weights do not need. The message gives the reason."""
