"""Fixtures of the studies' tests, shared with the package's tests."""

from fixtures import image_folder, no_pictures, signal_handlers  # noqa: F401
