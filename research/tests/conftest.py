"""Fixtures of the studies' tests, which are those of the package's tests."""

from fixtures import image_folder, no_pictures, signal_handlers  # noqa: F401
