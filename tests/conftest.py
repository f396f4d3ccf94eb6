"""Fixtures of every test of the package; `fixtures` also makes the environment that tests need."""

from fixtures import image_folder, no_pictures, poison, signal_handlers, uninterrupted  # noqa: F401
